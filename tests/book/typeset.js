// Reads a list of formulas, prints those that MathJax cannot typeset.
const formulas = JSON.parse(require("fs").readFileSync(0));
require(process.argv[2] + "/node-main.js")
  .init({
    loader: { load: ["input/tex-full", "adaptors/liteDOM"] },
    startup: { typeset: false },
    tex: {
      macros: JSON.parse(process.argv[3]),
      packages: { "[-]": ["bussproofs", "noerrors", "noundefined"] },
    },
  })
  .then((MathJax) => {
    for (const formula of formulas) {
      const mathml = MathJax.tex2mml(formula);
      const error = /data-mjx-error="([^"]*)"/.exec(mathml);
      if (error) console.log(`${error[1]}: ${formula}`);
    }
  });
