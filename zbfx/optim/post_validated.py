"""`PostValidated`: an optimizer of torch that clips and checks over all ranks of a pipeline without a barrier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zbfx.arguments import compared, positive_number, true_or_false
from zbfx.costs.estimate import hardware_of
from zbfx.errors import ZbfxError
from zbfx.optim import arguments
from zbfx.optim.consecutive import OptimizerPlan, estimated, planned
from zbfx.optim.final import FinalReaders, OnFinal
from zbfx.optim.inverse import Arithmetic, Rollback, checked_rollback, obstacle_of
from zbfx.optim.on_device import Ruling, clips_on_device, has_momentum
from zbfx.optim.pending import PendingStep, hyperparameters, read, taken
from zbfx.optim.state import Act, Counts, Layout, Rules, Share, Trained, Verdict, gradient_norms
from zbfx.optim.undo import Undo
from zbfx.program.chain import Chain, order_of_ranks
from zbfx.program.codegen import optimizer_program
from zbfx.program.messages import messages_of
from zbfx.runtime.engine import take_turns
from zbfx.runtime.runner import RankRunner
from zbfx.runtime.step import Step


class PostValidated(torch.optim.Optimizer):
    """Wraps an optimizer of a pipeline's `step`: gradients are clipped by their norm over all ranks, and a step where
    any of them is not finite is skipped on all, with the same results as after a barrier.

        opt = zbfx.optim.PostValidated(torch.optim.AdamW(step.parameters()), step, max_norm=1.0)

    Every rank steps at once on what it knows, learns the whole state while the next step warms up, and corrects itself
    if it was wrong (section 4 of the paper). Until then parameters, state and gradients are not final: `settle()` makes
    them so, on all ranks together, as do `state_dict`, `step.evaluate` and a second `step()`. Call it before you look
    at parameters, and at the end of training. `zero_grad()` takes effect then, too.

    optimizer    torch's, over `step.parameters()`, with any groups and schedulers; schedulers may also wrap this one. A
                 list of several, each over parameters of its own: they step together, under one norm
    step         what `bind` or `run_local` gave, the same call on every rank
    max_norm     largest norm of all gradients together, as in `torch.nn.utils.clip_grad_norm_`; None: no clipping
    check_finite skip the step on all ranks if any gradient is not finite; `verdict` says where it began
    grad_scaler  a `torch.amp.GradScaler`: backwards start from its scale, which is lowered on all ranks if a gradient
                 is not finite. Neither `scale` nor `update` of it is to be called
    rollback     how a wrong step is undone: "exact" (a copy of what it is about to change, on the device or, where that
                 is full, on the host), "arithmetic" (the inverse of the step, in place, up to rounding); None: exact
                 while memory allows it
    sync         True: wait for all ranks in `step()` instead, as a barrier does. False: never. None: in a step after
                 one that was clipped or skipped, for it will most likely be wrong, too, and its way back takes longer.
                 A fused SGD, Adam or AdamW waits on the device alone: this process goes on, and learns what became of
                 the step in the next one, or when `verdict` is asked for; where a skipped step went wrong, in the next

    `verdict` is that of the last settled step, `counts` adds them up, `print(opt.plan())` says what a step takes with a
    barrier and without, and what the way back costs. Raises `ZbfxError` for arguments of other kinds, optimizers that
    need a closure, parameters that are not the step's, and for what cannot be undone by arithmetic."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        step: Step,
        *,
        max_norm: float | None = None,
        check_finite: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
        rollback: str | None = None,
        sync: bool | None = None,
    ) -> None:
        # Not Optimizer.__init__: groups, state and hooks are the wrapped optimizer's (see __getattr__).
        def checked() -> None:
            self.optimizer = arguments.checked_optimizer(optimizer, step, PostValidated)
            self.target, self.sync = step.worker, None if sync is None else true_or_false("sync", sync)
            self.rules = Rules.of(max_norm, check_finite)
            self.rollback = checked_rollback(rollback, self.optimizer)
            self.grad_scaler = arguments.checked_scaler(grad_scaler, check_finite, self.optimizer)

        asked = arguments.Asked(max_norm, check_finite, arguments.state_of(grad_scaler), rollback, sync)
        worker = arguments.checked_step(step).worker
        worker.agreed("PostValidated", checked, compared(asked))
        self.readers = FinalReaders()
        self.pending: PendingStep | None = None
        self.unread: tuple[PendingStep, Ruling] | None = None  # final on the device
        self.unexplained: PendingStep | None = None  # skipped, and nobody has said why
        self.last_verdict: Verdict | None = None
        self.known_counts = Counts()
        device = worker.engine.pipe.device
        in_turn = device.type != "cuda" or worker.ranks.share_tensors  # one stream for all
        self.stream = None if in_turn else torch.cuda.Stream(device)
        self.places: dict[tuple[str, ...], Tensor] = {}  # of parameters in the state, on the device
        self.undos: dict[int, Undo] = {}  # by rank
        self.inverses: dict[int, Arithmetic] = {}
        pipe = worker.engine.pipe
        trained = Trained.of(worker)
        self.parameters, self.stages = trained.parameters, trained.stages
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        holders = self.holders = trained.holders
        names = [name for name in self.parameters if name in self.stages]
        self.layout = Layout.of(names, order_of_ranks(pipe.schedule, pipe.loss_rank), holders)
        self.shares = []
        for runner in worker.engine.runners:
            counted = [n for n in names if self.layout.counted_by[n] == runner.rank and id(self.parameters[n]) in held]
            own = [n for n in names if runner.rank in holders[n] and id(self.parameters[n]) in held]
            stepped = counted if worker.ranks.share_tensors else own
            self.shares.append(Share(runner.rank, tuple(stepped), tuple(counted)))
        self.seen: dict[int, list[Any]] = {share.rank: [] for share in self.shares} if check_finite else {}
        self.zero: bool | None = None  # whether the zero_grad that waits sets gradients to None
        self.waits = bool(sync)  # whether the step that is taken waits for all ranks
        self.runners: list[RankRunner] = []
        worker.attach(self, self.scale)
        if not sync:
            self.build_runners()

    def build_runners(self) -> None:
        """The programs that pass the state on, one for each rank of this process."""
        schedule, chain = self.target.engine.pipe.schedule, self.chain
        programs = [optimizer_program(chain, schedule, share.rank) for share in self.shares]
        transports = self.target.ranks.transports(programs, chain.pairs)
        for share, program, transport in zip(self.shares, programs, transports, strict=True):
            runner = RankRunner(program, self.target.tensors, transport, ())
            runner.bound("reduce").run = lambda *state, share=share: self.reduce(share, *state)
            runner.bound("step").run = lambda state, share=share: self.act(share, state)
            self.runners.append(runner)

    @property
    def chain(self) -> Chain:
        """Along which ranks pass the state on."""
        found = self.target.engine.pipe.validated(self.layout.chain, self.layout.size).chain
        assert found is not None, "of a validated pipeline"
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"PostValidated({self.optimizer!r})"

    @property
    def verdict(self) -> Verdict | None:
        """Of the last settled step. Where the device decides, this waits for it."""
        self.read_ruling()
        return self.last_verdict

    @property
    def counts(self) -> Counts:
        """What became of all settled steps."""
        self.read_ruling()
        return self.known_counts

    @property
    def programs(self) -> dict[int, str]:
        """By rank, what `step()` does, as Python."""
        return {runner.rank: runner.program.code for runner in self.runners}

    def plan(self, step_s: Sequence[float] | None = None) -> OptimizerPlan:
        """What a step takes with a barrier and without; `step_s`: measured seconds of the optimizer, by rank."""
        pipe = self.target.engine.pipe
        held = [
            sum(self.parameters[name].nbytes for name in self.stages if rank in self.holders[name])
            for rank in range(len(pipe.schedule.ranks))
        ]
        exact = self.rollback is not Rollback.ARITHMETIC
        costs = estimated(self.optimizer, held, exact=exact, hardware=hardware_of(pipe.device))
        if step_s is not None:
            costs = replace(costs, step_s=tuple(step_s))
        return planned(pipe.schedule, messages_of(pipe.stages, pipe.schedule), self.chain, costs)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, divide_by: float = 1.0) -> None:  # type: ignore[override]
        """Step on the gradients in `.grad`, without waiting for the other ranks; every rank calls it alike. They are
        divided by `divide_by` first: the tokens, where steps with loss_reduction="sum" have added up gradients of
        sums."""
        if closure is not None:
            raise ZbfxError("step takes no closure: a pipeline's step has computed the loss before. Call step()")
        divisor = positive_number("divide_by", divide_by, "a finite number above 0")
        with self.target.alone():
            self.settle()
            self.step_on(divisor)

    def step_on(self, divisor: float) -> None:
        scale = self.scale() * divisor
        if not 0.0 < scale < float("inf"):
            raise ZbfxError(f"divide_by is a finite number above 0; found {divisor!r} and a scale of {self.scale()}")
        self.target.begin("optimizer.step" if scale == 1.0 else f"optimizer.step of gradients divided by {scale!r}")
        gradients = {name: self.parameters[name].grad for share in self.shares for name in share.names}
        if scale != 1.0:
            for gradient in gradients.values():
                if gradient is not None:
                    gradient.div_(scale)
        seen = {rank: taken(watched) for rank, watched in self.seen.items()}
        self.pending = PendingStep(self, gradients, hyperparameters(self.optimizer), seen)
        self.waits = self.sync or (self.sync is None and self.verdict is not None and not self.verdict.is_clean)
        is_alone = len(self.layout.chain) == 1
        on_device = self.is_fused and has_momentum(self.optimizer) and self.grad_scaler is None
        if (self.waits or is_alone) and on_device:
            self.target.guarded(self.step_on_device)
            return
        if self.waits:
            self.target.guarded(self.wait_and_step)
        else:
            self.target.guarded(self.pass_on_and_step)
            if is_alone:
                self.pending.judge(self.pending.own_verdict())
                self.pending.correct()
        self.explain()

    def pass_on_and_step(self) -> None:
        runs = [
            runner.execute(range(len(runner.nodes)), runner.given(()), self.target.count) for runner in self.runners
        ]
        take_turns(runs)

    def wait_and_step(self) -> None:
        """Wait for the state of all ranks, as a barrier does, and step."""
        assert self.pending is not None, "step has begun"
        self.pending.judge(self.summed_state())
        self.pending.correct()

    def step_on_device(self) -> None:
        """Step once the state of all ranks is on the device. This process waits for neither, and reads later what
        became of the step."""
        assert self.pending is not None, "step has begun"
        ruling = Ruling(self.rules, self.layout, self.summed_state())
        for share in self.shares:
            self.pending.take(share.names, ruling.factor, ruling.skipped)
        self.pending.gradients = {}  # the next step's may need their memory
        self.unread, self.pending = (self.pending, ruling), None

    def read_ruling(self) -> None:
        """Learn what became of a step that was final on the device."""
        if self.unread is not None:
            (self.pending, ruling), self.unread = self.unread, None
            self.pending.verdict = ruling.verdict
            self.settled(self.pending.verdict, rolled_back=False)

    def summed_state(self) -> Tensor:
        """The state of all ranks, on each."""
        state = self.empty_state()
        for share in self.shares:
            self.count(share, state)
        self.target.ranks.add_up(state)
        return state

    def empty_state(self) -> Tensor:
        return torch.zeros(self.layout.size, dtype=torch.float64, device=self.target.engine.pipe.device)

    def count(self, share: Share, state: Tensor) -> None:
        """Add the norms of a rank's gradients to the state."""
        assert self.pending is not None, "step has begun"
        found = {name: gradient for name in share.counted if (gradient := self.pending.gradients[name]) is not None}
        if found:
            names = tuple(found)
            if names not in self.places:
                self.places[names] = torch.tensor(self.layout.places(names), device=state.device)
            norms = self.target.engine.whole_norms(torch.stack(gradient_norms(list(found.values()))))
            state.index_copy_(0, self.places[names], norms)

    def reduce(self, share: Share, partial: Tensor | None = None) -> Tensor:
        """The state with this rank's norms, and with what the rank does because of them."""
        assert self.pending is not None, "step has begun"
        state = self.empty_state() if partial is None else partial
        self.count(share, state)
        place = self.layout.place_of(share.rank)
        if self.decides_on_device:
            state[place] = self.rules.is_clean(state[: len(self.layout.names)])
        else:
            verdict = self.rules.judge(self.layout, read(state))
            act = self.early_act(share.rank, verdict)
            state[place] = float(act)
            self.pending.acts[share.rank] = (act, verdict)
        if share.rank == self.layout.chain[-1]:
            self.pending.complete(state)
        return state

    @property
    def decides_on_device(self) -> bool:
        """Whether the device leaves out early steps that would be wrong, as fused optimizers let it. Otherwise this
        process does, and has to wait for the gradients to read their norms."""
        return self.is_fused and len(self.layout.chain) > 1 and not self.waits

    @property
    def is_fused(self) -> bool:
        """Whether the optimizer takes from tensors what gradients are divided by, and whether to leave a step out."""
        return clips_on_device(self.optimizer)

    @property
    def device(self) -> torch.device:
        return self.target.engine.pipe.device

    def early_act(self, rank: int, partial: Verdict) -> Act:
        """What a rank does on a partial state: a norm that is too large already, or not finite, makes a step wrong."""
        if rank == self.layout.chain[-1]:
            return Act.KNEW
        return Act.STEPPED if partial.is_clean else Act.WAITED

    def way_back(self, rank: int, groups: list[dict[str, Any]], parameters: Sequence[Tensor]) -> Undo | Arithmetic:
        """How a rank undoes a step of these parameters under these hyperparameters."""
        undo = self.undos.setdefault(rank, Undo())
        wanted = self.rollback is Rollback.ARITHMETIC or (
            self.rollback is None and not undo.has_room(self.optimizer, parameters)
        )
        if not wanted or obstacle_of(self.optimizer, groups) is not None:
            return undo
        self.rollback = Rollback.ARITHMETIC  # memory that is full now will be needed for other things later
        return self.inverses.setdefault(rank, Arithmetic())

    def act(self, share: Share, state: Tensor) -> None:
        assert self.pending is not None, "step has begun"
        if self.decides_on_device:
            self.pending.step_early(share, leave_out=1.0 - state[self.layout.place_of(share.rank)].float())
            return
        act, verdict = self.pending.acts[share.rank]
        if act is Act.KNEW:
            self.pending.apply(share.names, verdict)
        elif act is Act.STEPPED:
            self.pending.step_early(share)

    def on_final(self, function: OnFinal) -> RemovableHandle:
        """Call `function(verdict)` after each step, as soon as parameters and state are as its verdict says, on this
        rank: in the next call of `step`, after its first forwards, or earlier where something settles. For averages and
        whatever else reads parameters: one that writes into them is an error. It makes no calls that other ranks take
        part in. `remove()` of the result ends it."""
        return self.readers.add(function)

    def refuse_calls(self) -> None:
        """Raises `ZbfxError` within a function of `on_final`."""
        self.readers.refuse_calls()

    @torch.no_grad()
    def settle(self) -> None:
        """Learn the verdict on the last step and correct it, if that has not happened yet; every rank calls it."""
        self.read_ruling()
        if self.pending is not None:
            with self.target.alone():
                self.target.begin("optimizer.settle")
                self.learn()

    def learn(self) -> None:
        """Settle within another call."""
        engine = self.target.engine
        for runner in engine.runners:
            runner.follow(self.pending, runner.watched)

        def verdicts() -> None:
            take_turns([runner.settle(self.target.count, warmed_up=False) for runner in engine.runners])
            for runner in engine.runners:
                runner.transport.finish()

        self.target.guarded(verdicts)
        self.explain()

    def explain(self) -> None:
        """Find where a skipped step went wrong. Ranks wait for each other in this, and so it comes last: devices of
        others may wait for all that this rank has yet to launch, such as the rest of a step whose forwards have run."""
        self.read_ruling()
        skipped, self.unexplained = self.unexplained, None
        if skipped is not None:
            self.last_verdict = self.target.guarded(skipped.explained)

    def settled(self, verdict: Verdict, rolled_back: bool) -> None:
        """Take a verdict into account, once the parameters are corrected."""
        self.unexplained = self.pending if verdict.skipped else None
        self.last_verdict, self.pending = verdict, None
        self.known_counts.steps += 1
        self.known_counts.clipped += not verdict.skipped and verdict.factor != 1.0
        self.known_counts.skipped += verdict.skipped
        self.known_counts.rolled_back += rolled_back
        self.known_counts.repeated += not self.waits and verdict.refutes_any
        if self.grad_scaler is not None:
            arguments.update_scale(self.grad_scaler, overflow=verdict.skipped)
            for engine in self.target.engines:
                engine.rescale()
        for runner in self.runners:
            runner.transport.finish()
        if self.zero is not None:
            self.optimizer.zero_grad(self.zero)
            self.zero = None
        self.readers.call(verdict, [self.parameters[name] for share in self.shares for name in share.names])

    def scale(self) -> float:
        """The factor of the loss's gradient with which backwards start."""
        return 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; while a step waits for its verdict, once that is known."""
        if self.pending is None:
            self.optimizer.zero_grad(set_to_none)
        else:
            self.zero = set_to_none

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.settle()
        arguments.load_state(self.optimizer, state_dict)

    def get_extra_state(self) -> dict[str, Any]:
        """What a checkpoint has of this optimizer beside the wrapped one's state."""
        scaler = None if self.grad_scaler is None else self.grad_scaler.state_dict()
        verdict = None if self.verdict is None else self.verdict.plain()
        return {"counts": asdict(self.counts), "verdict": verdict, "grad_scaler": scaler}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.known_counts = Counts(**state["counts"])
        self.last_verdict = None if state["verdict"] is None else Verdict.of(state["verdict"])
        if (self.grad_scaler is None) != (state["grad_scaler"] is None):
            raise ZbfxError(
                f"found a grad_scaler {'here' if state['grad_scaler'] is None else 'in the checkpoint'} alone: make "
                f"the optimizer as the one that was saved"
            )
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(state["grad_scaler"])
            for engine in self.target.engines:
                engine.rescale()

    def __reduce__(self) -> str:
        raise ZbfxError(
            "an optimizer of a pipeline's step holds connections and graphs, and cannot be copied or pickled; save "
            "state_dict(), and load it into one that is made the same way"
        )

    def __deepcopy__(self, memo: object) -> PostValidated:
        return self.__reduce__()  # type: ignore[return-value]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ZbfxError("add groups to the optimizer before PostValidated wraps it")
