"use strict";
// Draws the timelines of a page from its data; everything else on the page is plain HTML. Uses d3 alone.
const data = JSON.parse(document.getElementById("data").textContent);
const [LANE, IDLE, MEMORY, GAP, RIGHT] = [20, 5, 14, 5, 8];
const left = () => (innerWidth < 600 ? 52 : 70);
const shown = { path: document.getElementById("path"), messages: document.getElementById("messages") };
const tip = d3.select("#tip");
const views = data.views.map(prepared);
let transform = d3.zoomIdentity, waiting = false, hovered = null;

/** Unpacks a view: times by index become arrays of numbers; actions can be found by name. */
function prepared(view) {
  const at = indices => Float64Array.from(indices, index => view.times[index]);
  view.lanes.forEach(lane => {
    Object.assign(lane, { actions: words(lane.actions), start: at(lane.start), end: at(lane.end) });
    Object.assign(lane.idle, { start: at(lane.idle.start), end: at(lane.idle.end), before: words(lane.idle.before), because: words(lane.idle.because) });
    lane.parts = lane.actions.map(parsed);
    lane.beside = new Set(lane.beside);
    lane.height = LANE + IDLE + (lane.memory ? MEMORY : 0) + GAP;
  });
  view.found = [new Map(), new Map()];
  for (const lane of view.lanes) {
    lane.parts.forEach(({ kind, rest }, index) => {
      view.found[lane.clock].set((kind === "BW" ? "B" : kind) + rest, [lane, index]);
    });
  }
  view.onPath = view.paths.map(path => new Set(words(path)));
  return view;
}

function words(text) { return text ? text.split(" ") : []; }

function parsed(action) {
  const [, kind, stage, microbatch] = /^(BW|P|F|B|W)(\d+)\.(\d+)$/.exec(action);
  return { kind, stage: +stage, microbatch, rest: `${stage}.${microbatch}` };
}

/** A time as text, in the unit that suits `most`. */
function time(value, most = value) {
  const [size, unit] = data.units.find(([size]) => Math.abs(most) >= size) || data.units[data.units.length - 1];
  return `${+(value / size).toPrecision(6)} ${unit}`.trim();
}

function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20]]) {
    if (data.real && value >= size) return `${(value / size).toFixed(2)} ${unit}`;
  }
  return `${+value.toPrecision(6)}${data.real ? " B" : ""}`;
}

/** The scale of a clock of a view, zoomed. */
function scaleOf(view, clock = 0) {
  const full = d3.scaleLinear([0, view.clocks[clock]], [left(), view.width - RIGHT]);
  return transform.rescaleX(full);
}

for (const view of views) {
  view.box = d3.select(`#view-${view.key}`);
  view.axes = view.clocks.map((_, clock) => clock && view.clocks[0] === view.clocks[1] ? null
    : view.box.insert("svg", clock ? null : "canvas").append("g").attr("transform", `translate(0,${clock ? 1 : 21})`));
  view.canvas = view.box.select("canvas");
  view.zoom = d3.zoom().scaleExtent([1, 1e4])
    .wheelDelta(event => -event.deltaY * (event.deltaMode ? 0.05 : 0.002) * (event.ctrlKey ? 4 : 1))
    .filter(event => event.type === "wheel" ? event.ctrlKey || event.metaKey || event.shiftKey : !event.button)
    .on("zoom", event => { if (event.sourceEvent) moved(event.transform); });
  view.canvas.call(view.zoom).on("mousemove", event => hover(view, event)).on("mouseleave", () => leave())
    .on("click", event => program(laneAt(view, d3.pointer(event)[1])));
  new IntersectionObserver(entries => {
    view.visible = entries.at(-1).isIntersecting;
    redraw();
  }, { rootMargin: "100px" }).observe(view.box.node());
}

function moved(next) {
  transform = next;
  for (const view of views) view.canvas.property("__zoom", transform);
  redraw();
}

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    views.filter(view => view.visible).forEach(draw);
  });
}

function sized() {
  for (const view of views) {
    view.width = view.box.node().clientWidth;
    view.height = d3.sum(view.lanes, lane => lane.height) + GAP;
    const ratio = window.devicePixelRatio || 1;
    view.canvas.attr("width", view.width * ratio).attr("height", view.height * ratio).style("height", `${view.height}px`);
    view.pen = view.canvas.node().getContext("2d", { alpha: false, willReadFrequently: true });
    view.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const extent = [[left(), 0], [view.width - RIGHT, view.height]];
    view.zoom.extent(extent).translateExtent(extent);
  }
  redraw();
}

function draw(view) {
  const pen = view.pen, scales = view.clocks.map((_, clock) => scaleOf(view, clock));
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, view.width, view.height);
  pen.textBaseline = "middle";
  let top = GAP;
  for (const lane of view.lanes) {
    lane.top = top;
    drawLane(view, lane, scales[lane.clock]);
    top += lane.height;
  }
  if (shown.messages.checked) drawMessages(view, scales);
  if (hovered && hovered.view === view) drawLinks(view, scales, hovered.lane, hovered.index, "#000");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, left(), view.height);
  pen.fillRect(view.width - RIGHT, 0, RIGHT, view.height);
  pen.fillStyle = "#222";
  pen.font = "12px system-ui, sans-serif";
  for (const lane of view.lanes) pen.fillText(lane.name, 2, lane.top + LANE / 2);
  view.axes.forEach((axis, clock) => {
    if (!axis) return;
    const scale = scales[clock], [, to] = scale.domain(), count = Math.max(2, view.width / 110);
    axis.call((clock ? d3.axisBottom : d3.axisTop)(scale).ticks(count).tickFormat(value => time(value, to)));
  });
}

function drawLane(view, lane, scale) {
  const pen = view.pen, [from, to] = scale.domain(), top = lane.top, path = view.onPath[lane.clock];
  pen.fillStyle = "#f4f4f4";
  pen.fillRect(left(), top, view.width - left() - RIGHT, LANE);
  pen.font = "11px monospace";
  pen.textAlign = "center";
  const late = [];
  for (let i = d3.bisectLeft(lane.end, from); i < lane.actions.length && lane.start[i] < to; i++) {
    if (lane.beside.has(i)) { late.push(i); continue; }
    drawAction(pen, lane, i, scale, top, LANE, path);
  }
  for (const i of late) drawAction(pen, lane, i, scale, top + LANE / 2, LANE / 2, path);
  pen.textAlign = "left";
  const idle = lane.idle;
  for (let i = d3.bisectLeft(idle.end, from); i < idle.cause.length && idle.start[i] < to; i++) {
    const x = scale(idle.start[i]);
    pen.fillStyle = data.causes[idle.cause[i]].fill;
    pen.fillRect(x, top + LANE, Math.max(0.4, scale(idle.end[i]) - x), IDLE - 1);
  }
  if (lane.memory) drawMemory(view, lane, scale, from, to);
}

function drawAction(pen, lane, i, scale, top, height, path) {
  const { kind, stage, microbatch } = lane.parts[i], x = scale(lane.start[i]), width = scale(lane.end[i]) - x;
  pen.globalAlpha = data.opacity[stage];
  pen.fillStyle = data.fills[kind];
  pen.fillRect(x, top, Math.max(0.4, width - (width > 3 ? 1 : 0)), height);
  pen.globalAlpha = 1;
  if (shown.path.checked && path.has(lane.actions[i])) {
    pen.fillStyle = "#000";
    pen.fillRect(x, top, Math.max(0.5, width), 2.5);
  }
  const label = data.stages_each === 1 ? kind + microbatch : lane.actions[i];
  const text = width > label.length * 6.8 ? label : width > microbatch.length * 6.8 + 1 ? microbatch : "";
  if (text && height === LANE) {
    const middle = (Math.max(x, left()) + Math.min(x + width, scale.range()[1])) / 2;
    pen.fillStyle = "#000";
    pen.fillText(text, middle, top + height / 2 + 1.5);
  }
}

function drawMemory(view, lane, scale, from, to) {
  const pen = view.pen, bottom = lane.top + LANE + IDLE + MEMORY, curve = lane.memory;
  const y = held => bottom - (view.most ? held / view.most : 0) * (MEMORY - 1);
  pen.fillStyle = data.memory_fill;
  pen.beginPath();
  pen.moveTo(scale(from), bottom);
  let i = Math.max(0, d3.bisectRight(curve.time, from) - 1);
  for (; i < curve.time.length && curve.time[i] <= to; i++) {
    const x = scale(Math.max(from, curve.time[i])), until = scale(Math.min(to, i + 1 < curve.time.length ? curve.time[i + 1] : to));
    pen.lineTo(x, y(curve.held[i]));
    pen.lineTo(until, y(curve.held[i]));
  }
  pen.lineTo(scale(Math.min(to, view.clocks[0])), bottom);
  pen.fill();
  if (lane.limit !== null) {
    pen.fillStyle = data.limit_line;
    for (let x = left(); x < view.width - RIGHT; x += 7) pen.fillRect(x, y(lane.limit), 4, 1);
  }
}

/** The actions of other stages whose results an action takes. */
function sources({ kind, stage, microbatch }) {
  if (kind === "W" || kind === "P") return [];
  return data.edges.filter(edge => kind === "F" ? edge.target === stage && edge.forward : edge.source === stage && edge.backward)
    .map(edge => `${kind === "F" ? "F" : "B"}${kind === "F" ? edge.source : edge.target}.${microbatch}`);
}

function drawLinks(view, scales, lane, index, colour) {
  const pen = view.pen, scale = scales[lane.clock];
  for (const name of sources(lane.parts[index])) {
    const made = view.found[lane.clock].get(name);
    if (!made || made[0] === lane) continue;
    const [x0, y0, x1, y1] = [scale(made[0].end[made[1]]), made[0].top + LANE / 2, scale(lane.start[index]), lane.top + LANE / 2];
    if (Math.max(x0, x1) < left() || Math.min(x0, x1) > view.width) continue;
    const angle = Math.atan2(y1 - y0, x1 - x0);
    pen.strokeStyle = pen.fillStyle = colour;
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x1 - 7 * Math.cos(angle - 0.4), y1 - 7 * Math.sin(angle - 0.4));
    pen.lineTo(x1 - 7 * Math.cos(angle + 0.4), y1 - 7 * Math.sin(angle + 0.4));
    pen.fill();
  }
}

function drawMessages(view, scales) {
  for (const lane of view.lanes) {
    const [from, to] = scales[lane.clock].domain();
    const first = d3.bisectLeft(lane.end, from), last = d3.bisectRight(lane.start, to);
    if (last - first > 400) continue; // a hatching would hide the picture
    for (let i = first; i < last; i++) drawLinks(view, scales, lane, i, "#0008");
  }
}

function laneAt(view, y) { return view.lanes.find(lane => y >= lane.top && y < lane.top + lane.height); }

function hover(view, event) {
  const [x, y] = d3.pointer(event), lane = laneAt(view, y);
  if (!lane || x < left()) return leave();
  const at = scaleOf(view, lane.clock).invert(x), held = lane.memory ? heldAt(lane.memory, at) : "";
  let index = -1;
  for (let i = d3.bisectLeft(lane.end, at); i < lane.actions.length && lane.start[i] <= at; i++) {
    if (index < 0 || !lane.beside.has(i) || y - lane.top >= LANE / 2) index = i;
  }
  const idle = waitBefore(lane, index < 0 ? at : lane.start[index], index >= 0);
  const lines = index < 0 ? [`${lane.name}: idle`] : [
    `${lane.actions[index]} on ${lane.name}`, `${time(lane.start[index])} to ${time(lane.end[index])} (${time(lane.end[index] - lane.start[index])})`];
  if (idle) lines.push(`${index < 0 ? "" : "waited "}${time(idle.length)}: ${idle.cause}${idle.because ? ` (${idle.because})` : ""}`);
  if (held) lines.push(`holds ${held}${lane.limit === null ? "" : ` of ${bytes(lane.limit)}`}`);
  tip.text(lines.join("\n")).style("display", "block")
    .style("left", `${Math.min(event.clientX + 14, innerWidth - 230)}px`).style("top", `${event.clientY + 14}px`);
  if (hovered?.lane === lane && hovered.index === index) return;
  hovered = index < 0 ? null : { view, lane, index };
  redraw();
}

/** The piece of idle time that lies at a time, or that ends there. */
function waitBefore(lane, at, ends) {
  const idle = lane.idle, i = d3.bisectLeft(idle.end, at);
  if (i >= idle.cause.length || (ends ? idle.end[i] !== at : idle.start[i] > at)) return null;
  const because = idle.because[i] === "-" ? "" : idle.because[i];
  return { cause: data.causes[idle.cause[i]].name, because, length: idle.end[i] - idle.start[i] };
}

function heldAt(curve, at) { return bytes(curve.held[Math.max(0, d3.bisectRight(curve.time, at) - 1)]); }

function leave() {
  tip.style("display", "none");
  if (hovered) { hovered = null; redraw(); }
}

/** Shows the program of a lane's rank. */
function program(lane) {
  const choice = document.getElementById("rank");
  if (choice && lane) { choice.value = lane.rank; choice.dispatchEvent(new Event("change")); }
}

d3.select("#rank").on("change", event => d3.select("#program").text(data.programs[event.target.value]));
d3.selectAll("#path, #messages").on("change", redraw);
d3.selectAll("[data-zoom]").on("click", event => {
  const factor = +event.currentTarget.dataset.zoom, view = views[0];
  view.canvas.call(...(factor ? [view.zoom.scaleBy, factor] : [view.zoom.transform, d3.zoomIdentity]));
  moved(d3.zoomTransform(view.canvas.node()));
});
addEventListener("resize", sized);
sized();
