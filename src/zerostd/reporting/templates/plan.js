// The slider of a plan's page: plans for other budgets were made beforehand.
const slider = document.getElementById("budget");
function show() {
  const plan = REPORT.others[Number(slider.value)];
  document.getElementById("limit").textContent = plan.limit;
  const sizes = ["device", "host", "disk"].filter((tier) => plan[tier]).map((tier) => `${plan[tier]} on the ${tier}`);
  document.getElementById("answer").textContent = `A step takes ${plan.step}, with ${sizes.join(", ")}.`;
}
if (slider) {
  slider.addEventListener("input", show);
  show();
}
