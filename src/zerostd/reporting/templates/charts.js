"use strict";
// Charts from the report's numbers, as SVG. All text is set as text, never as markup.
const REPORT = JSON.parse(document.getElementById("report").textContent);
const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c5", "--c6", "--c7", "--c4"];
const windows = new Map(); // "timeline 0", "memory 0": [from, to] in seconds, where a chart is zoomed
const DASHES = ["", "7 4", "2 4", "10 3 2 3", "1 5", "12 5"];
const KINDS = { parameters: "--c0", gradients: "--c1", optimizer_states: "--c2", activations: "--c3", averages: "--c5", buffers: "--c4" };

const words = (text) => String(text).replace(/_/g, " ");
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const digits = (value) => (Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3))));

function bytesText(value) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= size) return `${(value / size).toFixed(2)} ${unit}`;
  return `${value} B`;
}

function secondsText(value) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (Math.abs(value) >= size) return `${digits(value / size)} ${unit}`;
  return value === 0 ? "0 s" : `${digits(value * 1e9)} ns`;
}

const valueText = (value) => (value === null ? "not finite" : String(Number(value.toPrecision(4))));

function draw(parent, tag, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  parent.appendChild(made);
  return made;
}

function add(parent, tag, text = null, name = null) {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  if (name !== null) made.className = name;
  parent.appendChild(made);
  return made;
}

// -- the tip: a title and rows of name and value --

const tip = document.getElementById("tip");

function showTip(at, title, rows) {
  tip.replaceChildren();
  add(tip, "b", title);
  for (const [name, value] of rows) {
    const row = add(tip, "div");
    add(row, "span", name);
    add(row, "span", value);
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = at.x + 16 + box.width > innerWidth ? at.x - 16 - box.width : at.x + 16;
  tip.style.left = `${clamp(left, 4, Math.max(4, innerWidth - box.width - 4))}px`;
  tip.style.top = `${clamp(at.y - box.height - 12 < 4 ? at.y + 16 : at.y - box.height - 12, 4, Math.max(4, innerHeight - box.height - 4))}px`;
}

const hideTip = () => { tip.hidden = true; };

// -- axes --

function ticks(low, high, count, base = 10) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, count);
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const steps = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  const step = power * steps.find((one) => one * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step + 0);
  return found;
}

// The width of the longest text in the reader's own font. What is folded up has none yet: a guess then.
function widest(svg, texts) {
  const probe = draw(svg, "text", {});
  const widths = texts.map((text) => {
    probe.textContent = text;
    return probe.getComputedTextLength() || 8 * text.length;
  });
  probe.remove();
  return Math.max(0, ...widths);
}

// A frame with axes: places of x and y, and the SVG to draw into.
function frame(parent, options) {
  const texts = options.yTicks.map(options.yText), width = Math.max(240, parent.clientWidth), height = options.height;
  const svg = draw(parent, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": options.label });
  const left = 12 + Math.ceil(widest(svg, texts)), right = width - 1, top = options.yLabel ? 26 : 10, bottom = height - 42;
  const [x0, x1] = options.xs, [y0, y1] = options.ys;
  const x = (value) => left + ((value - x0) / (x1 - x0 || 1)) * (right - left);
  const y = (value) => bottom - ((value - y0) / (y1 - y0 || 1)) * (bottom - top);
  options.yTicks.forEach((value, index) => {
    draw(svg, "line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) });
    draw(svg, "text", { x: left - 8, y: y(value) + 4.5, "text-anchor": "end" }, texts[index]);
  });
  draw(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
  for (const value of ticks(x0, x1, clamp(width / 110, 2, 9)).filter((one) => options.xWhole !== true || Number.isInteger(one))) {
    const place = x(value), anchor = place > width - 30 ? "end" : "middle";
    draw(svg, "text", { x: place, y: height - 24, "text-anchor": anchor }, options.xText(value));
  }
  draw(svg, "text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, options.xLabel);
  if (options.yLabel) draw(svg, "text", { x: 0, y: 12 }, options.yLabel);
  return { svg, x, y, width, height, left, right, top, bottom };
}

// Text that can be read on whatever is behind it.
function halo(svg, attributes, text) {
  const style = "paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; pointer-events: none";
  return draw(svg, "text", { ...attributes, style }, text);
}

// A crosshair that goes to the nearest of some places; pointer, touch and arrow keys.
function hover(made, places, describe) {
  const cross = draw(made.svg, "line", { class: "cross", y1: made.top, y2: made.bottom, visibility: "hidden" });
  let current = -1;
  const show = (index, y) => {
    current = index;
    const box = made.svg.getBoundingClientRect(), scale = box.width / made.width;
    cross.setAttribute("x1", places[index]);
    cross.setAttribute("x2", places[index]);
    cross.setAttribute("visibility", "visible");
    showTip({ x: box.left + places[index] * scale, y: y ?? box.top + made.top }, ...describe(index));
  };
  const hide = () => { cross.setAttribute("visibility", "hidden"); hideTip(); };
  const move = (event) => {
    const box = made.svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * made.width;
    let best = 0;
    for (let index = 1; index < places.length; index++) if (Math.abs(places[index] - at) < Math.abs(places[best] - at)) best = index;
    show(best, event.clientY);
  };
  made.svg.addEventListener("pointermove", move);
  made.svg.addEventListener("pointerdown", move);
  made.svg.addEventListener("pointerleave", hide);
  made.svg.addEventListener("blur", hide);
  made.svg.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way) { event.preventDefault(); show(clamp(current + way, 0, places.length - 1)); }
  });
}

function legend(parent, entries) {
  const list = add(parent, "ul", null, "legend");
  for (const [name, swatch] of entries) {
    const item = add(list, "li");
    const svg = draw(item, "svg", { viewBox: "0 0 22 12", "aria-hidden": "true" });
    if (swatch.fill) draw(svg, "rect", { x: 2, y: 0, width: 16, height: 12, rx: 2, style: `fill: var(${swatch.fill})` });
    else if (swatch.hollow) draw(svg, "rect", { class: "hollow", x: 2, y: 1, width: 16, height: 10 });
    else draw(svg, "line", { x1: 0, x2: 22, y1: 6, y2: 6, style: `stroke: var(${swatch.stroke}); stroke-width: 2; stroke-dasharray: ${swatch.dash || "none"}` });
    add(item, "span", name);
  }
}

// -- lines: losses and qualities, one for each run --

function drawLines(parent, series, title, text = valueText) {
  const shown = series.filter((one) => one.points.length);
  const values = shown.flatMap((one) => one.points.map((point) => point[1])).filter((value) => value !== null);
  const steps = shown.flatMap((one) => one.points.map((point) => point[0]));
  if (!steps.length) return;
  let low = values.length ? Math.min(...values) : 0, high = values.length ? Math.max(...values) : 1;
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  const xs = [Math.min(...steps), Math.max(...steps)];
  if (xs[0] === xs[1]) { xs[0] -= 1; xs[1] += 1; }
  const style = (index) => ({ stroke: COLOURS[index % COLOURS.length], dash: DASHES[index % DASHES.length] });
  if (series.length > 1) legend(parent, series.map((one, index) => [one.name, style(index)]).filter((_, index) => series[index].points.length));
  const ends = shown.map((one) => `${one.name}: ${text(one.points[one.points.length - 1][1])} at step ${one.points[one.points.length - 1][0]}`);
  const made = frame(parent, {
    height: 250, xs, ys: [low, high], yTicks: ticks(low, high, 5), yText: text, xWhole: true, xLabel: "step", yLabel: title,
    xText: (value) => value.toLocaleString("en-US"), label: `${title} by step; last of ${ends.join(", ")}`,
  });
  series.forEach((one, index) => {
    let path = "", open = false;
    for (const [step, value] of one.points) {
      if (value === null) draw(made.svg, "text", { x: made.x(step), y: made.bottom - 3, "text-anchor": "middle", class: "strong" }, "×");
      else path += `${open ? "L" : "M"}${made.x(step).toFixed(1)} ${made.y(value).toFixed(1)}`;
      open = value !== null;
    }
    const { stroke, dash } = style(index);
    if (path) draw(made.svg, "path", { class: "line", d: path, "data-points": one.points.length, style: `stroke: var(${stroke}); stroke-dasharray: ${dash || "none"}` });
    if (one.points.length === 1 && path) draw(made.svg, "circle", { cx: made.x(one.points[0][0]), cy: made.y(one.points[0][1]), r: 4, style: `fill: var(${stroke})` });
  });
  const all = [...new Set(steps)].sort((a, b) => a - b);
  const maps = shown.map((one) => [one.name, new Map(one.points)]);
  hover(made, all.map(made.x), (index) => [`step ${all[index].toLocaleString("en-US")}`,
    maps.filter(([, map]) => map.has(all[index])).map(([name, map]) => [shown.length > 1 ? name : title, text(map.get(all[index]))])]);
}

// -- memory: kinds stacked, a chart for each tier --

function drawMemory(parent, run, rank) {
  const plan = run.plans[run.plans.length - 1];
  for (const tier of run.memory.ranks[rank].tiers) {
    const figure = add(parent, "figure");
    add(figure, "h3", tier.tier);
    const price = plan ? plan.prices.find((one) => one.tier === tier.tier) : null;
    drawStack(figure, closer(tier, memoryWindow(run, rank), figure.clientWidth), price ? price.limit : null);
  }
}

function memoryWindow(run, rank) {
  const times = run.memory.ranks[rank].tiers.flatMap((tier) => [tier.times[0], tier.times[tier.times.length - 1]]);
  const all = [Math.min(...times), Math.max(...times)];
  return { all, now: windows.get(`memory ${REPORT.runs.indexOf(run)}`) || all };
}

// What of a tier lies in the window. Where that is more than can be seen, the largest moment of each step, or of each place.
function closer(tier, { now }, width) {
  const sum = (at) => tier.bytes.reduce((total, row) => total + row[at], 0), column = Math.max((now[1] - now[0]) / (width / 4), 1e-12);
  const largest = (some, key) => {
    const best = new Map();
    for (const at of some) if (!best.has(key(at)) || sum(at) > sum(best.get(key(at)))) best.set(key(at), at);
    return [...best.values()].sort((a, b) => a - b);
  };
  const first = tier.times.findLastIndex((time) => time <= now[0]), last = tier.times.findIndex((time) => time >= now[1]);
  let kept = [...tier.times.keys()].slice(Math.max(0, first), last < 0 ? undefined : last + 1);
  if (kept.length > width / 4) kept = largest(kept, (at) => tier.steps[at]);
  if (kept.length > width / 4) kept = largest(kept, (at) => Math.floor((tier.times[at] - now[0]) / column));
  const pick = (row) => kept.map((at) => row[at]);
  return { ...tier, times: pick(tier.times).map((time) => clamp(time, ...now)), steps: pick(tier.steps), bytes: tier.bytes.map(pick), peak: pick(tier.peak), allocated: tier.allocated.length ? pick(tier.allocated) : [], reserved: tier.reserved.length ? pick(tier.reserved) : [], of: tier.times.length };
}

function drawStack(figure, tier, limit) {
  const sums = tier.times.map((_, at) => tier.bytes.reduce((sum, row) => sum + row[at], 0));
  const most = Math.max(1, ...sums, ...tier.peak, ...tier.allocated.map((one) => one || 0), ...tier.reserved.map((one) => one || 0));
  const isNear = limit !== null && limit <= 2.5 * most;
  const top = Math.max(most, isNear ? limit : 0) * 1.06;
  const hasAllocated = tier.allocated.some((one) => one !== null);
  const hasReserved = tier.reserved.some((one) => one !== null);
  const lines = [["peak, all kinds", tier.peak, "5 3"], ...(hasAllocated ? [["allocated, with activations", tier.allocated, ""]] : []), ...(hasReserved ? [["reserved by the allocator", tier.reserved, "2 3"]] : [])];
  legend(figure, [
    ...tier.kinds.map((kind) => [words(kind), { fill: KINDS[kind] }]).reverse(),
    ...lines.map(([name, , dash]) => [name, { stroke: "--ink", dash }]),
    ...(limit !== null ? [[isNear ? "limit" : `limit ${bytesText(limit)}, above the chart`, { stroke: "--c5", dash: "10 3 2 3" }]] : []),
  ]);
  const times = tier.times.length > 1 ? tier.times : [tier.times[0], tier.times[0] + 1];
  const at = (index) => Math.min(index, tier.times.length - 1);
  const unit = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10, 1].find((size) => top >= size);
  const made = frame(figure, {
    height: 256, xs: [times[0], times[times.length - 1]], ys: [0, top], yTicks: ticks(0, top / unit, 5, unit === 1 ? 10 : 2).map((one) => one * unit),
    yText: (value) => bytesText(value).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 "), xText: secondsText, xLabel: "time since the run began",
    label: `${tier.tier} memory over time; ${tier.kinds.map((kind, row) => `${words(kind)} at most ${bytesText(Math.max(...tier.bytes[row]))}`).join(", ")}`,
  });
  const base = times.map(() => 0), tops = [];
  tier.bytes.forEach((row, index) => {
    const low = [...base];
    times.forEach((_, place) => { base[place] += row[at(place)]; });
    tops.push([low, [...base]]);
    const points = times.map((time, place) => `${made.x(time).toFixed(1)} ${made.y(base[place]).toFixed(1)}`);
    const back = times.map((time, place) => `${made.x(time).toFixed(1)} ${made.y(low[place]).toFixed(1)}`).reverse();
    draw(made.svg, "path", { class: "band", d: `M${points.join("L")}L${back.join("L")}Z`, "data-points": tier.times.length, "data-of-points": tier.of, style: `fill: var(${KINDS[tier.kinds[index]]})` });
  });
  tops.forEach(([low, high], index) => nameBand(made, times, low, high, words(tier.kinds[index])));
  for (const [, values, dash] of lines) {
    const path = times.map((time, place) => [time, values[at(place)]]).filter((point) => point[1] !== null);
    draw(made.svg, "path", { class: "over", d: `M${path.map(([time, value]) => `${made.x(time).toFixed(1)} ${made.y(value).toFixed(1)}`).join("L")}`, "stroke-dasharray": dash || "none" });
  }
  if (isNear) draw(made.svg, "line", { x1: made.left, x2: made.right, y1: made.y(limit), y2: made.y(limit), style: "stroke: var(--c5); stroke-width: 1.5; stroke-dasharray: 10 3 2 3" });
  hover(made, times.map(made.x), (index) => [`${secondsText(times[index])}, step ${tier.steps[at(index)]}`, [
    ...tier.kinds.map((kind, row) => [words(kind), bytesText(tier.bytes[row][at(index)])]).reverse(),
    ["total", bytesText(sums[at(index)])],
    ...lines.filter(([, values]) => values[at(index)] !== null).map(([name, values]) => [name, bytesText(values[at(index)])]),
  ]]);
}

// Writes a band's name where the band is thick enough for it, all along the text.
function nameBand(made, times, low, high, name) {
  const half = name.length * 3.7 + 6;
  let best = null;
  for (let part = 0.2; part < 0.95; part += 0.05) {
    const x = made.left + part * (made.right - made.left);
    let top = 0, bottom = Infinity;
    times.forEach((time, place) => {
      const near = made.x(time), next = place + 1 < times.length ? made.x(times[place + 1]) : near, last = place ? made.x(times[place - 1]) : near;
      if (next < x - half || last > x + half) return;
      top = Math.max(top, made.y(high[place]));
      bottom = Math.min(bottom, made.y(low[place]));
    });
    if (bottom - top >= 17 && x - half > made.left + 4 && x + half < made.right && (!best || bottom - top > best.room + 1)) best = { x, room: bottom - top, y: (top + bottom) / 2 };
  }
  if (best) draw(made.svg, "text", { class: "on", x: best.x, y: best.y + 4.5, "text-anchor": "middle" }, name);
}
