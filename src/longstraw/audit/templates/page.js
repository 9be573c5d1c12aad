"use strict";
// Pointing at a chart, or stepping through it with the arrow keys, shows the values of one step.
const tip = document.getElementById("tip");
for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.dataset.hover);
  const cursor = plot.querySelector(".cursor");
  let index = -1;
  const show = (next) => {
    index = Math.max(0, Math.min(next, data.at.length - 1));
    const box = plot.getBoundingClientRect();
    const x = data.at[index] / data.width * box.width;
    cursor.style.left = x + "px";
    tip.textContent = data.text[index];
    tip.hidden = cursor.hidden = false;
    const left = box.left + x + 12 + tip.offsetWidth > document.documentElement.clientWidth
      ? box.left + x - 12 - tip.offsetWidth : box.left + x + 12;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, box.top + 24) + "px";
  };
  const hide = () => { tip.hidden = cursor.hidden = true; };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * data.width;
    show(data.at.reduce((best, at, i) => Math.abs(at - x) < Math.abs(data.at[best] - x) ? i : best, 0));
  });
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { show(index + move); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
}
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
