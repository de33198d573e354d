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
// were drawn, unless they share labels or a legend.
function stack(figure) {
  const whole = figure.querySelector("g");
  const panels = [...whole.children].filter(({ id }) => /-axes_/.test(id));
  const labelled = (x) => x.querySelector("[id*=ytick] [id*=text]");
  const ticked = panels.filter((x) => x.querySelector("[id*=ytick]"));
  if (panels.length + 1 < whole.children.length) return;
  if (ticked.some(labelled) && !ticked.every(labelled)) return;
  const columns = [];
  for (const panel of panels) {
    const { x, width } = panel.getBBox();
    const column = columns.find(([from, to]) => x < to && from < x + width);
    if (!column) columns.push([x, x + width]);
    else {
      column[0] = Math.min(column[0], x);
      column[1] = Math.max(column[1], x + width);
    }
  }
  if (columns.length < 2) return;
  const parts = columns.map(([from, to], i) => {
    const part = i ? figure.cloneNode() : figure;
    const { height } = figure.viewBox.baseVal;
    part.setAttribute("viewBox", `${from} 0 ${to - from} ${height}`);
    part.style = `display: inline-block; width: ${(4 / 3) * (to - from)}px;
      max-width: 100%; margin-bottom: 1rem`;
    if (!i) return part;
    part.setAttribute("aria-hidden", true); // the first has the words for all
    part.innerHTML = `<use href="#${whole.id}"/>`;
    return part;
  });
  figure.after(...parts.slice(1));
}

if (matchMedia("(max-width: 480px)").matches)
  document.querySelectorAll("svg.fw-figure").forEach(stack);
