// The Python that makes the state on screen after token t (t from 0): the
// film's tensors as the page carries them, and one call of the library.
function code(data, decay, t) {
  const [T, K, V] = [data.k.length, data.k[0].length, data.v[0].length];
  const float = (x) => (/[.e]/.test(`${x}`) ? `${x}` : `${x}.0`);
  // [1.0, 2.5] on lines of at most 79 characters.
  const list = (x, start) => {
    const lines = [start + "["];
    x.forEach((number, i) => {
      const word = `${float(number)}${i + 1 < x.length ? ", " : "]"}`;
      const last = lines.length - 1;
      if ((lines[last] + word).length < 79) lines[last] += word;
      else lines.push(start + " " + word);
    });
    return lines.map((line) => line.trimEnd()).join("\n");
  };
  const tensor = (name, x, note) => {
    const inside = Array.isArray(x[0])
      ? `[\n${x.map((row) => list(row, "    ") + ",\n").join("")}]`
      : "\n" + list(x, "    ") + "\n";
    return `${name} = torch.tensor(${inside})  # ${note}\n`;
  };
  const gated = decay !== null || Boolean(data.g);
  const channels = decay === null && gated && Array.isArray(data.g[0]);
  const text = [
    "import torch\nimport fastweights as fw\n\n",
    tensor("k", data.k, `[T, K] = [${T}, ${K}]`),
    tensor("v", data.v, `[T, V] = [${T}, ${V}]`),
  ];
  if (decay !== null)
    text.push(`g = torch.full((${T},), ${float(decay)}).log()\n`);
  else if (gated) text.push(tensor("g", data.g, "log of the decay"));
  if (data.beta) text.push(tensor("beta", data.beta, "write strength"));
  const additive = channels ? "gla" : gated ? "mamba2" : "linear_attention";
  const delta = channels ? "kda" : gated ? "gated_deltanet" : "deltanet";
  const names = ["k", "k", "v"];
  if (gated) names.push("g");
  if (data.beta) names.push("beta");
  if (!t) {
    text.push(`\nS = torch.zeros(${K}, ${V})  # before the first token\n`);
    return text.join("");
  }
  return text.concat([
    `\nt = ${t}  # tokens so far, one sequence with one head; `,
    "k as the query\n",
    `_, S = fw.${data.beta ? delta : additive}(\n`,
    names.map((name) => `    ${name}[None, :t, None],\n`).join(""),
    ")\n",
    `S = S[0, 0]  # [${K}, ${V}], as on screen\n`,
  ]).join("");
}

if (typeof document === "undefined" && typeof module !== "undefined") {
  module.exports = { code };
}
