const page = document.documentElement;

// Paper is white: what is printed is light, whatever the reader's theme.
let theme;
addEventListener("beforeprint", () => {
  theme = page.dataset.theme;
  page.dataset.theme = "light";
});
addEventListener("afterprint", () => (page.dataset.theme = theme));

// A choice closes its menu, and the focus goes back to the menu's button.
addEventListener("click", ({ target }) => {
  const menu = target.closest(".theme-change-button")?.closest(".dropdown");
  menu?.querySelector(".dropdown-toggle").focus();
});

// On a phone the panels of a figure stand below each other, as large as they
// were drawn: each part shows a column of them.
function stack(figure) {
  const { height } = figure.viewBox.baseVal;
  const columns = JSON.parse(figure.dataset.panels);
  const parts = columns.map(() => figure.cloneNode(true));
  columns.forEach(([start, end], i) => {
    const part = parts[i];
    part.setAttribute("viewBox", `${start} 0 ${end - start} ${height}`);
    part.style.width = `${(4 / 3) * (end - start)}px`;
    if (i) part.setAttribute("aria-hidden", true); // the first has the words
  });
  figure.replaceWith(...parts);
}

if (matchMedia("(max-width: 480px)").matches)
  document.querySelectorAll("[data-panels]").forEach(stack);
