// Sets the formulas of a page; without it, or without JavaScript, they stand there as TeX.
for (const element of document.querySelectorAll(".arithmatex")) {
  const [, tex] = element.textContent.trim().match(/^\\[([](.*)\\[)\]]$/s);
  katex.render(tex, element, {displayMode: element.tagName === "DIV", throwOnError: false});
}
