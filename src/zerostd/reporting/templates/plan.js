"use strict";
// The slider of a plan's page: plans for other budgets were made beforehand.
const PLANS = JSON.parse(document.getElementById("report").textContent);
const slider = document.getElementById("budget");
function show() {
  const plan = PLANS[Number(slider.value)];
  document.getElementById("limit").textContent = plan.limit;
  const sizes = ["device", "host", "disk"].filter((tier) => plan[tier]).map((tier) => `${plan[tier]} on the ${tier}`);
  document.getElementById("answer").textContent = `A step takes ${plan.step}, with ${sizes.join(", ")}.`;
}
if (slider) {
  slider.addEventListener("input", show);
  show();
}
document.documentElement.dataset.drawn = "0";
