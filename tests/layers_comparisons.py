"""Every comparison with a name or a text in the library, by the reason for which it may be one.

`tests/layers.py` reads this table: reason, file, and the comparisons as `ast.unparse` prints them. Behaviour that a
text chooses belongs in a record or an enum, and not in this table.
"""

from __future__ import annotations

from collections.abc import Mapping

COMPARISONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "fx: what kind of node it is, or what its metadata holds": {
        "passes/canonicalize.py": (
            "value.op != 'placeholder'",
            "GRADIENT_ADDITION_MARK in (node.meta.get('stack_trace') or '')",
            "source.op == 'call_function'",
        ),
        "passes/cluster.py": ("node.op == 'call_function'",),
        "passes/extract.py": ("node.op == 'placeholder'", "n.op == 'placeholder'", "n.op != 'placeholder'"),
        "passes/nodes.py": ("node.op != 'call_function'",),
        "passes/partition.py": ("value.op == 'placeholder'", "IS_PLACED in user.meta"),
        "passes/positions.py": ("node.op == 'call_function'", "node.op != 'call_function'", "IS_PLACED in node.meta"),
        "zbfx/_torch.py": ("node.meta.get('partitioner_tag') == 'is_backward'",),
        "zbfx/costs/estimate.py": ("node.op != 'call_function'", "'val' not in node.meta", "'val' in source.meta"),
        "zbfx/costs/made_up.py": ("'val' not in node.meta", "node.op == 'call_function'"),
        "zbfx/costs/measure.py": ("node.op == 'call_function'", "'val' in node.meta"),
        "zbfx/memory/lifetimes.py": ("node.op == 'placeholder'", "node.op == 'call_function'", "node.op == 'output'"),
        "zbfx/memory/walk.py": (
            "node.op == 'placeholder'",
            "'action' in node.meta",
            "node.op == 'output'",
            "node.op == 'call_module'",
        ),
        "zbfx/program/boxed.py": ("node.op != 'output'",),
        "zbfx/runtime/runner.py": ("node.op in ('placeholder', 'output')", "node.op == 'call_module'"),
        "zbfx/selfcheck.py": ("'val' in node.meta",),
        "zbfx/trace/first_forward.py": ("node.op == 'placeholder'",),
        "zbfx/trace/loss.py": ("node.op in ('placeholder', 'output')",),
        "zbfx/trace/tensor_parallel.py": ("node.op in ('placeholder', 'output')", "node.op == 'output'"),
        "zbfx/trace/tracer.py": ("node.op != 'placeholder'",),
        "zbfx/verify/graph_rules.py": ("node.op == 'call_function'", "node.op == 'placeholder'"),
        "zbfx/verify/program_rules.py": ("node.op == 'call_module'", "node.op == 'placeholder'"),
    },
    "torch: names in operators' schemas, in descriptors, and of entries of its dicts": {
        "passes/nodes.py": ("argument.name == 'dropout_p'",),
        "zbfx/_torch.py": (
            "getattr(operator, 'namespace', None) in COLLECTIVE_NAMESPACES",
            "description.attr == '_local_tensor'",
        ),
        "zbfx/optim/pending.py": ("key != 'params'",),
        "zbfx/trace/guard.py": ("name != 'training'",),
    },
    "torch: the type of a device": {
        "zbfx/comm/channels.py": (
            "device.type != 'cuda'",
            "device.type == 'cuda'",
            "self.device.type != 'cuda'",
            "self.device.type == 'cuda'",
        ),
        "zbfx/costs/clock.py": ("device.type != 'cuda'", "device.type == 'cuda'"),
        "zbfx/costs/estimate.py": ("device.type == 'cpu'",),
        "zbfx/costs/links.py": ("device.type != 'cuda'", "device.type == 'cuda'"),
        "zbfx/costs/measure.py": ("device.type == 'cuda'", "conditions.device.type == 'cuda'"),
        "zbfx/memory/predict.py": ("device.type == 'cuda'", "device.type != 'cuda'", "options.device.type == 'cuda'"),
        "zbfx/optim/post_validated.py": ("device.type != 'cuda'",),
        "zbfx/optim/undo.py": ("tensor.device.type == 'cuda'",),
        "zbfx/options.py": (
            "found.type == 'meta'",
            "found.type not in DEVICES",
            "device.type != 'cuda'",
            "device.type == 'meta'",
            "found.type == 'cuda'",
            "device.type == 'cuda'",
        ),
        "zbfx/rng.py": ("device.type != 'cpu'",),
        "zbfx/runtime/launched.py": ("device.type in LOADS",),
        "zbfx/runtime/step.py": ("self.engine.pipe.device.type == 'cuda'",),
        "zbfx/runtime/timeline.py": ("self.device.type != 'cuda'", "self.device.type == 'cuda'"),
        "zbfx/selfcheck.py": ("pipe.device.type == 'cuda'",),
        "zbfx/trace/signature.py": ("tensor.device.type == 'cpu'", "device.type == 'cuda'"),
    },
    "torch.distributed: the backend of a process group": {
        "zbfx/comm/channels.py": ("backend == 'gloo'", "self.backend == 'gloo'", "dist.get_backend(group) == 'gloo'"),
    },
    "Python: names of modules and methods, private names, instructions": {
        "passes/__init__.py": ("__name__ != 'zbfx.passes'",),
        "zbfx/__main__.py": ("__name__ == '__main__'",),
        "zbfx/optim/post_validated.py": ("name == 'optimizer'",),
        "zbfx/program/boxed.py": ("name != 'self'",),
        "zbfx/schedule/integer/mip_child.py": ("__name__ == '__main__'",),
        "zbfx/trace/first_forward.py": ("name == '__init__'",),
        "zbfx/trace/guard.py": ("function.__name__ != '__init__'", "step.opname in READS", "name.startswith('__')"),
        "zbfx/trace/objective.py": (
            "name.startswith('__i')",
            "name == '__setitem__'",
            "name.endswith('_')",
            "name.endswith('__')",
        ),
        "zbfx/trace/signature.py": ("'__eq__' not in dir_of(left)",),
    },
    "tracebacks and arguments: paths of files": {
        "zbfx/cli_check.py": ("place.endswith('.py')", "f.filename.startswith('<frozen importlib')"),
        "zbfx/trace/objective.py": ("frame.f_code.co_filename.startswith(LIBRARY_FOLDERS)",),
        "zbfx/trace/refusals.py": (
            "'_higher_order_ops' in frame.filename",
            "frame.filename.startswith(DISTRIBUTIONS)",
            "frame.name in CHECKS_OF_ARGUMENTS",
            "frame.filename.endswith('/nn/attention/flex_attention.py')",
            "frame.filename.startswith(LIBRARY_FOLDERS)",
            "'/nn/modules/' in f.filename",
            "f.filename.endswith('/module.py')",
        ),
    },
    "identity: finds something by its own name in a mapping or set of names; nothing is chosen by what the name is": {
        "passes/canonicalize.py": ("port.name in written",),
        "passes/partition.py": ("port.name == name", "owner.startswith(name + '.')"),
        "passes/positions.py": ("port.name in written",),
        "passes/recompute.py": ("port.name in names",),
        "zbfx/runtime/engine.py": ("spec.name in read", "s.name in names"),
        "zbfx/runtime/loading.py": ("port.name in call.phase.updates",),
        "zbfx/runtime/runner.py": ("addition.name in self.adds",),
    },
    "formats: keys and units of files, of the system and of arguments": {
        "zbfx/cli_check.py": ("'model' not in given",),
        "zbfx/comm/place.py": ("RANKS not in names",),
        "zbfx/costs/tables.py": (
            "'placement' in table.values",
            "'edges' in table.values",
            "'t_comm' in table.values",
            "key in REQUIRED_STAGE_KEYS",
        ),
        "zbfx/optim/undo.py": ("'MemAvailable' in sizes",),
        "zbfx/timing/limits.py": ("number.endswith(unit)",),
    },
    "other programs: the words in which they answer": {
        "zbfx/schedule/integer/solver.py": (
            "'HiGHS not found' in errors",
            "\"No module named 'mip'\" in errors",
            "'import of mip halted' in errors",
            "status in ('INFEASIBLE', 'INT_INFEASIBLE')",
            "status == 'OPTIMAL'",
        ),
    },
    "options: the text is checked, or given its meaning, where it enters; everything else asks the record": {
        "zbfx/comm/channels.py": ("transport not in TRANSPORTS",),
        "zbfx/optim/inverse.py": ("rollback not in (None, 'exact', 'arithmetic')",),
        "zbfx/options.py": (
            "self.check not in CHECKS",
            "self.costs == 'measure'",
            "self.recompute != 'auto'",
            "costs not in ('estimate', 'measure')",
            "recompute != 'auto'",
            "text.endswith('x')",
            "self.schedule != 'auto'",
            "costs != 'measure'",
        ),
        "zbfx/runtime/options.py": (
            "self.on_new_shape not in NEW_SHAPES",
            "self.on_nonfinite != 'keep'",
            "self.on_nonfinite == 'raise'",
            "self.on_new_shape == 'refuse'",
            "self.on_new_shape == 'symbolic'",
        ),
        "zbfx/runtime/verdict.py": ("on_nonfinite not in CHOICES",),
        "zbfx/schedule/orders/registry.py": ("name in SEARCHED", "request in SEARCHED"),
        "zbfx/schedule/planner.py": ("schedule in GENERATORS", "schedule in SEARCHED"),
        "zbfx/timing/limits.py": ("mem_limit.strip().lower().endswith('x')",),
    },
}
