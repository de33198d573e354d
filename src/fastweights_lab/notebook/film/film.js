// The film of a matrix state S [K][V]: film/page.py puts this file beside the
// data of one film, and `film` brings the element that holds both to life.
// Tokens, rows and columns count from 1 for the reader, from 0 in arrays.
"use strict";

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

// S^T k: what the state answers to k.
const read = (S, k) => S[0].map((_, j) => dot(k, S.map((row) => row[j])));

// What one token makes of S: what it keeps, what it erases, what it writes.
// g is null, a number or [K]; beta is null for the additive rule.
function parts(S, k, v, g, beta) {
  const decay = k.map((_, i) => Math.exp(Array.isArray(g) ? g[i] : g || 0));
  const kept = S.map((row, i) => row.map((x) => decay[i] * x));
  const rate = beta === null ? 1 : beta;
  const old = beta === null ? v.map(() => 0) : read(kept, k);
  const erased = k.map((x) => old.map((y) => -rate * x * y));
  const written = k.map((x) => v.map((y) => rate * x * y));
  return { kept, erased, written };
}

// (I - beta k k^T) Diag(e^g) S + beta k v^T, or Diag(e^g) S + k v^T.
function step(S, k, v, g, beta) {
  const { kept, erased, written } = parts(S, k, v, g, beta);
  return kept.map((row, i) =>
    row.map((x, j) => x + erased[i][j] + written[i][j])
  );
}

// The gate of token t (from 0); a number `decay` stands in for every gate.
function gate(data, decay, t) {
  if (decay !== null) return Math.log(decay);
  return data.g ? data.g[t] : null;
}

const rate = (data, t) => (data.beta ? data.beta[t] : null);

// The states S_0 = 0, S_1, ..., S_T.
function run(data, decay) {
  const states = [data.k[0].map(() => data.v[0].map(() => 0))];
  data.k.forEach((k, t) => {
    const g = gate(data, decay, t);
    states.push(step(states[t], k, data.v[t], g, rate(data, t)));
  });
  return states;
}

// The share of v in the answer to k / |k|^2, to which k v^T answers v.
function share(S, k, v) {
  const size = dot(k, k) * dot(v, v);
  return size ? dot(read(S, k), v) / size : 0;
}

// What the decays up to t left of token j's own k v^T, asked with its key;
// null under the delta rule, where later tokens also erase.
function left(data, decay, j, t) {
  if (data.beta) return null;
  const k = data.k[j];
  const logs = k.map(() => 0);
  for (let s = j + 1; s < t; s++) {
    const g = gate(data, decay, s);
    logs.forEach((_, i) => (logs[i] += Array.isArray(g) ? g[i] : g || 0));
  }
  const size = dot(k, k);
  return size ? dot(k, k.map((x, i) => x * Math.exp(logs[i]))) / size : 0;
}

function figure(x) {
  const text = Math.abs(x).toFixed(2);
  return (x < 0 && text !== "0.00" ? "\u2212" : "") + text;
}

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const peak = (x) => Math.max(...x.flat(2).map(Math.abs)) || 1;

const SVG = "http://www.w3.org/2000/svg";

function add(parent, tag, attributes = {}, html = "") {
  const svg = tag === "svg" || parent.namespaceURI === SVG;
  const made = svg
    ? document.createElementNS(SVG, tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  if (html) made.innerHTML = html;
  parent.append(made);
  return made;
}

function film(root) {
  if (root.filmed) return;
  root.filmed = true;
  const data = JSON.parse(root.dataset.film);
  const T = data.k.length;
  const K = data.k[0].length;
  const V = data.v[0].length;
  const live = root.querySelector(".fw-film-live");
  let decay = null; // null: as given
  let states = run(data, decay);
  const opens = Number(root.dataset.opens);
  let t = opens;
  let chosen = null; // {row, column} of S, or {token}
  let follows = false; // the scrolling, until the reader takes over
  let playing = 0;

  const full = { k: peak(data.k), v: peak(data.v), s: peak(states) };
  const shares = states.flatMap((S, n) =>
    data.k.slice(0, n).map((k, j) => share(S, k, data.v[j]))
  );
  const high = clamp(Math.max(1, ...shares), 1, 2);
  const low = clamp(Math.min(0, ...shares), -1, 0);

  // A symbol in its colour.
  const symbol = (name, n = "") =>
    `<b class="${name.toLowerCase()}">${name}</b>${n && `<sub>${n}</sub>`}`;

  live.textContent = "";

  // The bars: one per token.
  const under = add(live, "div", { class: "fw-film-answers" });
  const unit = data.k.every((k) => Math.abs(dot(k, k) - 1) < 1e-3);
  const answer = `${symbol("S")}<sup>\u22a4</sup>${symbol("k", "j")}` +
    (unit ? "" : `/|${symbol("k", "j")}|<sup>2</sup>`);
  const dash = '<span class="fw-film-rule" aria-hidden="true"></span>';
  const line = data.beta ? "" : ` The line ${dash} is what decay alone has ` +
    "left of it; other tokens with similar keys have added or taken the rest.";
  const meaning = `A bar per token: how much of ${symbol("v", "j")} ` +
    `comes back to its key, in ${answer}.${line}`;
  add(under, "p", { class: "fw-film-note" }, meaning);
  const chart = add(under, "div", { class: "fw-film-bars", role: "img" });
  const height = (x) => `${(100 * (x - low)) / (high - low)}%`;
  for (const x of [0, 1]) {
    const level = add(chart, "i", { class: "fw-film-level" }, `${x}`);
    level.style.bottom = height(x);
  }
  const every = Math.ceil(T / 16);
  const bars = data.k.map((_, j) => {
    const place = add(chart, "div", { "data-token": j });
    const bar = add(place, "i", { class: "fw-film-bar" });
    const tick = add(place, "i", { class: "fw-film-tick" });
    const shown = j === 0 || (j + 1) % every === 0;
    add(place, "span", {}, shown ? `${j + 1}` : "");
    return { place, bar, tick };
  });

  // The picture: v above S, k to its left.
  const state = add(live, "div", { class: "fw-film-state" });
  const side = Math.min(36, 288 / V, 320 / K);
  const font = Math.min(12, 0.8 * side);
  const top = font + side + 22;
  const start = font * 1.6 + side + 28;
  const width = start + V * side;
  const svg = add(state, "svg", {
    viewBox: `0 0 ${width + 1} ${top + K * side + 1}`,
    style: `max-width: ${Math.round(1.1 * width)}px`,
    "font-size": font,
    "aria-hidden": "true",
  });
  const text = (x, y, name, inside = "", anchor = "middle") => {
    const place = { x, y, class: name, "text-anchor": anchor };
    return add(svg, "text", place, inside);
  };
  // A mark as large as its cell; the negative one has a minus cut out.
  const a = side / 2 - 1;
  const whole = `M${-a} ${-a}H${a}V${a}H${-a}Z`;
  const cut = `${whole}M${-a / 2} ${-a / 5}V${a / 5}H${a / 2}V${-a / 5}Z`;
  const cell = (x, y, name, more = {}) => {
    const at = { transform: `translate(${x + side / 2} ${y + side / 2})` };
    const group = add(svg, "g", { ...at, ...more });
    add(group, "path", { class: "fw-film-cell", d: whole });
    const mark = add(group, "path", {});
    return (value) => {
      const strength = Math.min(1, Math.sqrt(Math.abs(value) / full[name]));
      mark.setAttribute("d", value < 0 ? cut : whole);
      mark.setAttribute("class", value < 0 ? "fw-film-minus" : name);
      mark.style.fillOpacity = strength.toFixed(3);
    };
  };
  const inset = font * 1.6;
  const label = {
    k: text(inset + side / 2, top - 7, "k fw-film-name"),
    v: text(start - 6, font + side / 2 + 6, "v fw-film-name", "", "end"),
  };
  const row = [];
  const column = [];
  const grid = [];
  for (let i = 0; i < K; i++) {
    const y = top + i * side;
    text(font * 0.7, y + side / 2 + font / 3, "ink", `${i + 1}`);
    row.push(cell(inset, y, "k"));
    grid.push([]);
    for (let j = 0; j < V; j++) {
      const more = { "data-row": i, "data-column": j };
      grid[i].push(cell(start + j * side, y, "s", more));
    }
  }
  for (let j = 0; j < V; j++) {
    const x = start + j * side;
    text(x + side / 2, font - 2, "ink", `${j + 1}`);
    column.push(cell(x, font + 2, "v"));
  }
  const frame = add(svg, "path", { class: "fw-film-chosen", d: "" });
  const scale = ["k", "v", "s"].map((name) => {
    const shown = symbol(name === "s" ? "S" : name);
    return `${shown} ${figure(full[name])}`;
  });
  add(state, "p", { class: "fw-film-note" }, `Full colour from
    ${scale.join(", ")}; <span class="fw-film-swatch" aria-hidden="true"
    >\u2212</span> is negative.`);

  // The controls.
  const panel = add(live, "div", { class: "fw-film-panel" });
  const range = (name, attributes) => {
    const line = add(panel, "label", {}, `<span>${name}</span>`);
    const output = add(line, "output");
    const input = add(line, "input", { type: "range", ...attributes });
    return { output, input };
  };
  const time = range("token", { min: 0, max: T, step: 1, value: T });
  const buttons = add(panel, "div", { class: "fw-film-buttons" });
  const button = (name, parent) =>
    add(parent, "button", { type: "button" }, name);
  const back = button("Back", buttons);
  const play = button("Play", buttons);
  const forward = button("Forward", buttons);
  let keep = null;
  let given = null;
  const decays = (data.g || [0]).flat().map(Math.exp);
  const [least, most] = [Math.min(...decays), Math.max(...decays)];
  if (root.dataset.decay === "true") {
    const mean = decays.reduce((x, y) => x + y) / decays.length;
    const value = clamp(mean, 0.02, 1);
    const steps = { min: 0.02, max: 1, step: 0.02 };
    keep = range("decay e<sup>g</sup>", { ...steps, value });
    given = button("As given", panel);
  }
  const shows = button("Show the formula", panel);
  shows.setAttribute("aria-expanded", "false");
  const said = add(panel, "p", { class: "fw-film-said" });
  const keys = "Keys: \u2190 \u2192 step, space plays, Home and End jump, " +
    "Shift and arrows choose a cell.";
  add(panel, "p", { class: "fw-film-note fw-film-keys" }, keys);

  const listing = add(live, "div", { class: "fw-film-code", hidden: "" });
  const formula = add(listing, "p");
  const copies = button("Copy", listing);
  const python = add(add(listing, "pre", { tabindex: "0" }), "code");

  const between = least.toFixed(2) === most.toFixed(2)
    ? figure(least)
    : `${figure(least)} to ${figure(most)}`;

  function rule() {
    if (!t) return `${symbol("S", "0")} = 0`;
    const g = gate(data, decay, t - 1);
    let kept = symbol("S", `${t - 1}`);
    if (Array.isArray(g)) kept = `diag(e<sup>g</sup>)\u00a0${kept}`;
    else if (g) kept = `${figure(Math.exp(g))}\u00a0${kept}`;
    const k = symbol("k", t);
    const v = `${symbol("v", t)}<sup>\u22a4</sup>`;
    if (!data.beta) return `${symbol("S", t)} = ${kept} + ${k}${v}`;
    const beta = figure(data.beta[t - 1]);
    return `${symbol("S", t)} = (I \u2212 ${beta}\u00a0${k}` +
      `${symbol("k", t)}<sup>\u22a4</sup>) ${kept} + ${beta}\u00a0${k}${v}`;
  }

  const when = () => (t ? `after token ${t}` : "before the first token");

  function sentence() {
    if (!chosen && follows) {
      return "Scroll on: the film follows, until you use its controls.";
    }
    if (!chosen) {
      return "Point at a cell of S, or at a bar, to read its number.";
    }
    if ("token" in chosen) {
      const j = chosen.token;
      if (j >= t) return `Token ${j + 1} is not written ${when()}.`;
      const answer = share(states[t], data.k[j], data.v[j]);
      const own = left(data, decay, j, t);
      const rest = own === null ? "" : `: decay has left ${figure(own)}, ` +
        `other tokens add ${figure(answer - own)}`;
      return `Asked with key ${j + 1}, S answers ${figure(answer)} of ` +
        `value ${j + 1} ${when()}${rest}.`;
    }
    const { row: i, column: j } = chosen;
    const now = `S[${i + 1},${j + 1}] = ${figure(states[t][i][j])} ${when()}`;
    if (!t) return `${now}.`;
    const before = states[t - 1];
    const g = gate(data, decay, t - 1);
    const made = parts(before, data.k[t - 1], data.v[t - 1], g,
      rate(data, t - 1));
    const { kept, erased, written } = made;
    const less = `, erasing adds ${figure(erased[i][j])}`;
    return `${now}: kept ${figure(kept[i][j])} of ${figure(before[i][j])}` +
      `${data.beta ? less : ""}, writing adds ${figure(written[i][j])}.`;
  }

  function tell() {
    said.textContent = sentence();
    const cellOf = chosen && "row" in chosen;
    frame.setAttribute("d", cellOf ? whole : "");
    if (cellOf) {
      const x = start + (chosen.column + 0.5) * side;
      const y = top + (chosen.row + 0.5) * side;
      frame.setAttribute("transform", `translate(${x} ${y})`);
    }
    bars.forEach(({ place }, j) => {
      place.classList.toggle("chosen", Boolean(chosen) && chosen.token === j);
    });
  }

  function draw() {
    row.forEach((put, i) => put(t ? data.k[t - 1][i] : 0));
    column.forEach((put, j) => put(t ? data.v[t - 1][j] : 0));
    grid.forEach((puts, i) => puts.forEach((put, j) => put(states[t][i][j])));
    for (const [name, place] of Object.entries(label)) {
      place.innerHTML = `${name}<tspan class="fw-film-sub"
        dy="${font / 4}">${t || ""}</tspan>`;
    }
    const spoken = bars.map(({ place, bar, tick }, j) => {
      const there = j < t;
      const value = there ? share(states[t], data.k[j], data.v[j]) : 0;
      const end = clamp(value, low, high);
      const own = there ? left(data, decay, j, t) : null;
      bar.style.bottom = height(Math.min(0, end));
      bar.style.height = `${(100 * Math.abs(end)) / (high - low)}%`;
      bar.classList.toggle("minus", value < 0);
      bar.classList.toggle("over", Math.abs(value - end) > 1e-6);
      tick.hidden = own === null;
      tick.style.bottom = height(clamp(own || 0, low, high));
      place.classList.toggle("now", j === t - 1);
      return there ? `${j + 1}: ${figure(value)}` : "";
    });
    chart.setAttribute("aria-label", t
      ? `Share of each value in the answer to its key ${when()}: ` +
        spoken.slice(0, t).join(", ")
      : "No token is written yet.");
    time.input.value = t;
    time.input.setAttribute("aria-valuetext", `${t} of ${T}`);
    time.output.textContent = `${t} of ${T}`;
    back.disabled = t === 0;
    forward.disabled = t === T;
    play.textContent = playing ? "Pause" : "Play";
    if (keep) {
      const value = decay === null ? `as given: ${between}` : figure(decay);
      keep.output.textContent = value;
      keep.input.setAttribute("aria-valuetext", value);
      given.setAttribute("aria-pressed", String(decay === null));
    }
    said.setAttribute("aria-live", playing || follows ? "off" : "polite");
    if (!listing.hidden) {
      formula.innerHTML = rule();
      python.textContent = code(data, decay, t);
    }
    tell();
  }

  function pause() {
    clearInterval(playing);
    playing = 0;
  }

  // The first pass: from token 0, where the film comes into sight, to the
  // token that it opens at, where it is about to leave.
  function follow() {
    if (!follows) return;
    if (!root.isConnected) return release();
    const seen = innerHeight;
    const { top, height: tall } = live.getBoundingClientRect();
    const first = 0.6 * seen;
    const last = Math.min(0.1, 0.9 - tall / seen) * seen;
    const passed = (first - top) / (first - last);
    const to = clamp(Math.round(opens * passed), 0, opens);
    if (to !== t) go(to);
    if (to === opens) release();
  }

  function release() {
    follows = false;
    document.removeEventListener("scroll", follow, { capture: true });
    if (root.isConnected) draw();
  }

  function copy() {
    const done = () => (copies.textContent = "Copied");
    const select = () => {
      getSelection().selectAllChildren(python);
      if (document.execCommand("copy")) done();
    };
    if (!navigator.clipboard) return select();
    navigator.clipboard.writeText(python.textContent).then(done, select);
  }

  function go(to) {
    t = clamp(to, 0, T);
    if (t === T) pause();
    draw();
  }

  function toggle() {
    if (playing) {
      pause();
      draw();
      return;
    }
    playing = setInterval(() => (root.isConnected ? go(t + 1) : pause()), 500);
    go(t === T ? 0 : t);
  }

  function set(value) {
    decay = value;
    states = run(data, decay);
    draw();
  }

  function choose(event) {
    const at = event.target.closest("[data-row], [data-token]");
    if (!at || !live.contains(at)) return;
    const { row: i, column: j, token } = at.dataset;
    chosen = token ? { token: +token } : { row: +i, column: +j };
    tell();
  }

  function move(key) {
    const { row: i = 0, column: j = 0 } = chosen || {};
    const by = { Up: [-1, 0], Down: [1, 0], Left: [0, -1], Right: [0, 1] };
    const [down, right] = chosen && "row" in chosen ? by[key] : [0, 0];
    chosen = {
      row: clamp(i + down, 0, K - 1),
      column: clamp(j + right, 0, V - 1),
    };
    tell();
  }

  function press(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (listing.contains(event.target)) return;
    const own = event.target.tagName;
    const arrow = /^Arrow(.*)$/.exec(event.key);
    if (arrow && event.shiftKey) move(arrow[1]);
    else if (event.key === " " && own !== "BUTTON") toggle();
    else if (own === "INPUT") return;
    else if (event.key === "ArrowLeft") pause(), go(t - 1);
    else if (event.key === "ArrowRight") pause(), go(t + 1);
    else if (event.key === "Home") pause(), go(0);
    else if (event.key === "End") pause(), go(T);
    else return;
    if (follows) release();
    event.preventDefault();
    event.stopPropagation();
  }

  live.addEventListener("keydown", press);
  live.addEventListener("pointerover", choose);
  live.addEventListener("click", choose);
  for (const kind of ["keydown", "input", "click"]) {
    panel.addEventListener(kind, () => follows && release(), true);
  }
  shows.addEventListener("click", () => {
    listing.hidden = !listing.hidden;
    shows.textContent = `${listing.hidden ? "Show" : "Hide"} the formula`;
    shows.setAttribute("aria-expanded", String(!listing.hidden));
    copies.textContent = "Copy";
    draw();
  });
  copies.addEventListener("click", copy);
  back.addEventListener("click", () => (pause(), go(t - 1)));
  forward.addEventListener("click", () => (pause(), go(t + 1)));
  play.addEventListener("click", toggle);
  time.input.addEventListener("input", () => {
    pause();
    go(+time.input.value);
  });
  if (keep) {
    keep.input.addEventListener("input", () => set(+keep.input.value));
    given.addEventListener("click", () => set(null));
  }
  live.hidden = false;
  root.classList.add("fw-film-on");
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (!still && live.getBoundingClientRect().top > innerHeight) {
    follows = true; // it begins out of sight, below
    t = 0;
    const how = { capture: true, passive: true };
    document.addEventListener("scroll", follow, how);
  }
  draw();
}

// A notebook may run the script before it has put the element in the page.
function begin(id, tries = 100) {
  const found = document.querySelectorAll(`[id="${id}"]`);
  found.forEach(film);
  if (!found.length && tries) setTimeout(() => begin(id, tries - 1), 50);
}

if (typeof document === "undefined" && typeof module !== "undefined") {
  module.exports = { left, parts, run, share, step };
}
