// Everything put in its place: charts that follow the width of the window, choices, tables that sort.
const broken = [];

function tellBroken(what) {
  broken.push(what);
  document.documentElement.dataset.errors = broken.join(" | ");
}

addEventListener("error", (event) => tellBroken(event.message));
document.addEventListener("securitypolicyviolation", (event) => tellBroken(`refused: ${event.violatedDirective}`));

const chosen = new Map(); // "memory 0": the index of the rank, "timeline 0": of the step

const CHARTS = {
  steps: (box) => drawLines(box, REPORT.runs.map((run) => ({ name: run.name, points: run.step_times.points })), "step time", (value) => (value === null ? "-" : secondsText(value))),
  curve: (box, at) => drawLines(box, REPORT.runs.map((run) => ({
    name: run.name, points: (run.curves.find((one) => one.name === at.dataset.name) || { points: [] }).points,
  })), at.dataset.name),
  losses: (box) => drawLines(box, REPORT.runs.map((run) => ({ name: run.name, points: run.losses.points })), "loss"),
  quality: (box, at) => drawLines(box, REPORT.runs.map((run) => ({
    name: run.name, points: (run.quality.find((one) => one.name === at.dataset.name) || { points: [] }).points,
  })), at.dataset.name),
  memory: (box, at) => drawMemory(box, REPORT.runs[at.dataset.run], chosen.get(`memory ${at.dataset.run}`) || 0),
  timeline: (box, at) => drawTimeline(box, REPORT.runs[at.dataset.run], chosen.get(`timeline ${at.dataset.run}`) || 0),
};

function redraw(at) {
  let box = at.querySelector(":scope > .drawn");
  if (!box) {
    box = document.createElement("div");
    box.className = "drawn";
    at.insertBefore(box, at.querySelector(":scope > figcaption"));
  }
  box.replaceChildren();
  try {
    CHARTS[at.dataset.chart](box, at);
  } catch (error) {
    add(box, "p", `This chart cannot be drawn: ${error.message}`, "broken");
    tellBroken(`${at.dataset.chart}: ${error.message}`);
  }
}

const places = [...document.querySelectorAll("[data-chart]")];
const redrawOf = (key) => places.filter((at) => `${at.dataset.chart} ${at.dataset.run}` === key).forEach(redraw);

function windowOf(key) {
  const [chart, number] = key.split(" "), run = REPORT.runs[number], index = chosen.get(key) || 0;
  if (chart === "memory") return memoryWindow(run, index);
  const step = run.timeline.steps[index], all = [step.from_s, step.to_s];
  return { all, now: windows.get(key) || all };
}

for (const pick of document.querySelectorAll("[data-pick]")) {
  pick.value = "0"; // browsers keep choices over reloads
  pick.addEventListener("change", () => {
    chosen.set(pick.dataset.pick, Number(pick.value));
    windows.delete(pick.dataset.pick);
    redrawOf(pick.dataset.pick);
  });
}
for (const button of document.querySelectorAll("[data-zoom]")) {
  const key = button.parentElement.dataset.zooms;
  button.addEventListener("click", () => {
    const { all, now } = windowOf(key);
    windows.set(key, zoomed(now, all, button.dataset.zoom));
    redrawOf(key);
  });
}

function sortBy(head) {
  const table = head.closest("table"), body = table.tBodies[0], column = [...head.parentElement.children].indexOf(head);
  const way = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", way);
  const isNumber = head.classList.contains("number");
  const key = (row) => row.cells[column].dataset.value;
  const compare = (a, b) => (isNumber && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b, "en", { numeric: true }));
  const rows = [...body.rows].sort((a, b) => {
    const [left, right] = [key(a), key(b)];
    if (left === undefined || right === undefined) return (left === undefined) - (right === undefined); // what is not there comes last
    return way === "ascending" ? compare(left, right) : compare(right, left);
  });
  body.append(...rows);
}

for (const button of document.querySelectorAll("thead button")) button.addEventListener("click", () => sortBy(button.closest("th")));

let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  places.forEach(redraw);
}).observe(document.body);
addEventListener("scroll", hideTip, { passive: true });
width = document.body.clientWidth;
places.forEach(redraw);
document.documentElement.dataset.drawn = String(places.length);
