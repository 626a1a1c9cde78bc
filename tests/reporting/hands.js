// Does to a page what hands do, and writes down what it shows then.
const tell = (name, value) => { document.documentElement.dataset[name] = value; };
const table = (name) => document.querySelector(`[data-table="${name}"]`);
const values = (name, column) => [...table(name).querySelectorAll("tbody tr")].map((row) => row.cells[column].dataset.value).join(" ");
const press = (name, column) => table(name).querySelectorAll("thead button")[column].click();
const move = (at, x, y) => at.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: x, clientY: y }));
const key = (at, name) => at.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
const all = (what) => [...document.querySelectorAll(what)];
const shown = () => document.getElementById("tip").innerText;

tell("before", values("speed", 4));
press("speed", 4);
tell("up", values("speed", 4));
press("speed", 4);
tell("down", values("speed", 4));
press("speed", 0);
press("speed", 0);
tell("names", values("speed", 0));
tell("sort", table("speed").querySelector("th[aria-sort]").getAttribute("aria-sort"));

const chart = document.querySelector("[data-chart=losses] svg[role=img]"), box = chart.getBoundingClientRect();
move(chart, box.right, box.top + 50);
tell("tip", shown());
key(chart, "ArrowLeft");
tell("left", shown());
move(all("[data-bar]")[0], 5, 5);
tell("bar", shown());

const count = all("[data-bar]").length;
for (const one of all("[data-zoom=in]")) { one.click(); one.click(); }
tell("fewer", all("[data-bar]").length < count);
for (const one of all("[data-zoom]")) one.click();
for (const one of all("[data-zoom=out]")) for (let times = 0; times < 4; times++) one.click();
tell("same", all("[data-bar]").length === count);

for (const one of all("select")) {
  one.value = String(one.options.length - 1);
  one.dispatchEvent(new Event("change"));
}
for (const one of all("svg")) {
  move(one, 200, 200);
  key(one, "ArrowRight");
}
for (const one of all("thead button")) one.click();
