// The timeline of one step: a row for each rank and lane, a bar for each event.
const BARS = { forward: "--c0", backward: "--c3", gather: "--c6", release: "--c4", reduce: "--c5", transfer: "--c1", update: "--c2", step: "--c7", several: "--c4" };
const LANES = { cpu: "CPU", up: "link up", down: "link down", wire: "between ranks" };

function drawTimeline(parent, run, step) {
  const shown = run.timeline.steps[step], span = windows.get(`timeline ${REPORT.runs.indexOf(run)}`) || [shown.from_s, shown.to_s];
  const width = Math.max(240, parent.clientWidth), narrow = width < 560;
  const gutter = narrow ? 0 : 84, track = 20, gap = 7, label = narrow ? 18 : 0, hasRanks = new Set(shown.rows.map((row) => row.rank)).size > 1;
  const names = [...new Set(shown.rows.flatMap((row) => row.bars.map((bar) => bar.name)))];
  const order = Object.keys(BARS), known = [...order.filter((name) => names.includes(name)), ...names.filter((name) => !order.includes(name))];
  legend(parent, known.map((name) => [name === "several" ? "several, drawn as one bar" : name, name === "wait" ? { hollow: true } : { fill: BARS[name] || "--c4" }]));
  let y = 8, rank = null;
  const places = shown.rows.map((row) => {
    const isNew = row.rank !== rank;
    rank = row.rank;
    if (isNew && hasRanks) y += narrow ? 32 : 26;
    const place = { y: y + label, head: isNew && hasRanks ? y - (narrow ? 14 : 8) : null };
    y += label + track * (1 + Math.max(...row.bars.map((bar) => bar.track))) + gap;
    return place;
  });
  const height = y + 26, right = width - 1;
  const x = (value) => gutter + ((value - span[0]) / (span[1] - span[0] || 1)) * (right - gutter);
  const total = shown.rows.map((row) => `${hasRanks ? `rank ${row.rank} ` : ""}${LANES[row.lane] || row.lane} busy ${secondsText(row.busy_s)}`);
  const svg = draw(parent, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": `Timeline of ${shown.step === undefined ? "a simulated step" : `step ${shown.step}`}, ${secondsText(shown.seconds)}: ${total.join(", ")}` });
  for (const value of ticks(span[0], span[1], clamp(width / 110, 2, 9))) {
    draw(svg, "line", { class: "grid", x1: x(value), x2: x(value), y1: 4, y2: height - 24 });
    draw(svg, "text", { x: x(value), y: height - 8, "text-anchor": x(value) < gutter + 20 ? "start" : x(value) > width - 30 ? "end" : "middle" }, secondsText(value));
  }
  const bars = [];
  shown.rows.forEach((row, index) => {
    const place = places[index];
    if (place.head !== null) draw(svg, "text", { class: "strong", x: 0, y: place.head + 4 }, `rank ${row.rank}`);
    if (narrow) halo(svg, { x: 4, y: place.y - 5 }, LANES[row.lane] || row.lane);
    else draw(svg, "text", { x: 0, y: place.y + 15 }, LANES[row.lane] || row.lane);
    for (const bar of row.bars) {
      const made = drawBar(svg, bar, place.y + bar.track * track, track - 2, [x(bar.start), x(bar.end)], [gutter, right]);
      if (made) { bars.push([made, row, bar]); }
    }
  });
  for (const value of [0, shown.seconds]) if (value >= span[0] && value <= span[1] && shown.seconds < shown.to_s * 1.0001) draw(svg, "line", { class: "edge", x1: x(value), x2: x(value), y1: 4, y2: height - 24 });
  pointAtBars(svg, bars, hasRanks);
}

function drawBar(svg, bar, y, height, [start, end], [left, right]) {
  if (end < left || start > right) return null;
  const from = Math.max(left, start), width = Math.max(1.5, Math.min(right, end) - from - 0.5);
  const isWait = bar.name === "wait";
  const made = draw(svg, "rect", { x: from.toFixed(2), y, width: width.toFixed(2), height, rx: Math.min(2.5, width / 3), "data-bar": "", ...(isWait ? { class: width < 5 ? "hollow thin" : "hollow" } : { style: `fill: var(${BARS[bar.name] || "--c4"})` }) });
  const texts = [bar.group ? `${bar.name} ${bar.group}` : bar.name, bar.group || bar.name, bar.group.replace(/^.*\./, "")];
  const text = texts.find((one) => one && one.length * 7 + 8 <= width);
  if (text) draw(svg, "text", { ...(isWait ? { style: "pointer-events: none" } : { class: "on" }), x: (from + width / 2).toFixed(1), y: y + height / 2 + 4.5, "text-anchor": "middle" }, text);
  return made;
}

function pointAtBars(svg, bars, hasRanks) {
  let current = -1;
  const unlight = () => { if (current >= 0) bars[current][0].classList.remove("lit"); };
  const show = (index, at) => {
    unlight();
    current = index;
    const [rect, row, bar] = bars[index], box = rect.getBoundingClientRect();
    rect.classList.add("lit");
    const rows = [["lane", `${LANES[row.lane] || row.lane}${hasRanks ? `, rank ${row.rank}` : ""}`]];
    if (bar.way) rows.push(["from", bar.way]);
    if (bar.bytes) rows.push(["bytes", bytesText(bar.bytes)]);
    rows.push(["takes", secondsText(bar.end - bar.start)]);
    if (bar.bytes && bar.end > bar.start) rows.push(["rate", `${digits(bar.bytes / (bar.end - bar.start) / 1e9)} GB/s`]);
    rows.push(["starts at", secondsText(bar.start)]);
    if (bar.events > 1) rows.push(["events", String(bar.events)]);
    showTip(at || { x: box.left + box.width / 2, y: box.top }, `${bar.name} ${bar.group}`.trim(), rows);
  };
  const find = new Map(bars.map(([rect], index) => [rect, index]));
  const move = (event) => {
    const index = find.get(event.target);
    if (index === undefined) { unlight(); hideTip(); } else show(index, { x: event.clientX, y: event.clientY });
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  for (const name of ["pointerleave", "blur"]) svg.addEventListener(name, () => { unlight(); hideTip(); });
  svg.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way && bars.length) { event.preventDefault(); show(clamp(current + way, 0, bars.length - 1)); }
  });
}

// Another window, inside all there is.
function zoomed([from, to], all, how) {
  const whole = all[1] - all[0], length = to - from;
  const size = clamp(how === "in" ? length / 2 : how === "out" ? length * 2 : length, whole / 1024, whole);
  const centre = (from + to) / 2 + ({ left: -1, right: 1 }[how] || 0) * length * 0.4;
  const start = clamp(centre - size / 2, all[0], all[1] - size);
  return [start, start + size];
}
