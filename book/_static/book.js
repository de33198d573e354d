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
