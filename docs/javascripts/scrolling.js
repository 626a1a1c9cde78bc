// Wide tables and code can be scrolled with the keyboard. The button that copies code is no landmark.
"use strict";
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
  for (const nav of document.querySelectorAll("nav.md-code__nav")) {
    const box = document.createElement("div");
    box.className = nav.className;
    box.append(...nav.childNodes);
    nav.replaceWith(box);
  }
});
