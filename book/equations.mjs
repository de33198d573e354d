// Reads macros and a list of [TeX, whether it is displayed]; writes a list of
// [MathML, why there is none]. Temml makes it. Some of TeX's rules for spaces
// are ours.
import { readFileSync } from "node:fs";
import temml from "temml";

const { macros, equations } = JSON.parse(readFileSync(0));
const SCRIPTS = /^m(sub|sup|subsup|under|over|underover)$/;

const text = (node) => node?.children?.[0]?.text;
const isApplied = (next) => text(next) === "\u2061";
const isFence = (node) =>
  node?.type === "mrow" && node.children[0]?.attributes?.stretchy === "true";
const endsOperand = (node) =>
  node.type !== "mspace" && (node.type !== "mo" || /[)\]}⟩‖]/.test(text(node)));

function space(node, inScript = false) {
  // A fragment has no element of its own.
  const children = (node.children ?? []).flatMap((child) =>
    child.children && !child.type ? child.children : child,
  );
  if (node.children) node.children = children;
  // No space around an operator in a script.
  if (inScript && node.type === "mo") {
    node.setAttribute("lspace", "0");
    node.setAttribute("rspace", "0");
  }
  // A line of a derivation that begins with + or - goes on with a sum.
  if (node.type === "mtd" && node.classes.includes("tml-left")) {
    const first = node.children[0]?.children?.[0];
    if (first?.attributes?.form === "prefix" && /[+−]/.test(text(first)))
      first.setAttribute("form", "infix");
  }
  // A thin space before log, and between two fences.
  for (let place = children.length - 1; place > 0; place--) {
    const [before, child, next] = children.slice(place - 1);
    if (
      (isApplied(next) && endsOperand(before)) ||
      (isFence(before) && isFence(child))
    ) {
      const thin = new child.constructor("mspace");
      thin.setAttribute("width", "0.1667em");
      children.splice(place, 0, thin);
    }
  }
  children.forEach((child, place) =>
    space(child, inScript || (SCRIPTS.test(node.type) && place > 0)),
  );
}

function typeset([tex, displayMode]) {
  const options = {
    annotate: true,
    displayMode,
    macros: { ...macros },
    throwOnError: true,
    trust: true,
  };
  try {
    const tree = temml.__renderToMathMLTree(tex, options);
    space(tree);
    return [tree.toMarkup(), null];
  } catch (error) {
    return [null, error.message];
  }
}

console.log(JSON.stringify(equations.map(typeset)));
