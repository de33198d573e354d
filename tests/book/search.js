// Reads a list of queries, prints the first places that the site finds.
const { readFileSync } = require("fs");
const { runInThisContext } = require("vm");

for (const name of ["minisearch", "places", "search"]) {
  const file = `${process.argv[2]}/_static/${name}.js`;
  runInThisContext(readFileSync(file, "utf-8"));
}
const search = runInThisContext("Search");
search.open(runInThisContext("PLACES")).then(() => {
  const found = JSON.parse(readFileSync(0)).map((query) =>
    search.find(query).slice(0, 3).map(({ page, id }) => `${page}#${id}`),
  );
  console.log(JSON.stringify(found));
});
