// A run as a command, a program, or a batch file. No DOM.
//
// A run is {prompts, shared, params}: texts or conversations (lists of messages); fields of all cells, like max_tokens;
// and fields for the cells of each prompt.

export const FORMATS = [
  {id: 'curl', label: 'curl', file: 'playground.sh', type: 'text/x-shellscript', write: curl},
  {id: 'python', label: 'Python', file: 'playground.py', type: 'text/x-python', write: python},
  {id: 'batch', label: 'batch file', file: 'playground.jsonl', type: 'application/jsonl', write: batchFile},
];

/** The text of an export. target: {origin, keyed, model, maxTokens}: the last is the length of the context. */
export const exported = (id, run, target) => FORMATS.find((each) => each.id === id).write(run, target);

const isChat = (run) => Array.isArray(run.prompts[0]);

/** The body of `POST /generate/batch`. */
export function batchBody(run) {
  const {prompts: [first, ...others], shared, params} = run;
  if (!others.length) return {[isChat(run) ? 'messages' : 'prompt']: first, params, ...shared};
  return {prompts: isChat(run) ? run.prompts.map((messages) => ({messages})) : run.prompts, params, ...shared};
}

/** One cell as a run, with the seed that its text had, or null. */
export function cellAlone({prompts, shared, params}, index, seed) {
  const own = params[index % params.length];
  const prompt = prompts[Math.floor(index / params.length)];
  return {prompts: [prompt], shared, params: [seed === null ? own : {...own, seed}]};
}

const NAMES = /\b(true|false|null)\b/;

/** JSON is Python but for three names. */
const namesOf = (code) => (NAMES.test(code) ? '\ntrue, false, null = True, False, None' : '');

/** An object with each field on a line, or a list with each item on one. */
function lines(value) {
  const all = Array.isArray(value)
    ? value.map((each) => JSON.stringify(each))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${JSON.stringify(each)}`);
  const [begin, end] = Array.isArray(value) ? '[]' : '{}';
  return `${begin}\n    ${all.join(',\n    ')}\n${end}`;
}

function curl(run, {origin, keyed}) {
  const header = keyed ? ' \\\n  -H "Authorization: Bearer $CPPBATCH_API_KEY"' : '';
  return `curl ${origin}/generate/batch -H 'Content-Type: application/json'${header} -d '${
    lines(batchBody(run)).replaceAll("'", "'\\''")}'\n`;
}

function python(run, {origin, keyed}) {
  const header = keyed ? ', "Authorization": "Bearer " + os.environ["CPPBATCH_API_KEY"]' : '';
  const body = lines(batchBody(run));
  return `import json
${keyed ? 'import os\n' : ''}import urllib.request
${namesOf(body)}
body = ${body}
headers = {"Content-Type": "application/json"${header}}
request = urllib.request.Request("${origin}/generate/batch", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as answer:
    for result in json.load(answer)["results"]:
        print(result["index"], result.get("text", result.get("error")))
`;
}

function batchFile(run, target) {
  const url = isChat(run) ? '/v1/chat/completions' : '/v1/completions';
  const line = (body, i) => `${JSON.stringify({custom_id: `cell-${i + 1}`, method: 'POST', url, body})}\n`;
  return bodies(run, target).map(line).join('');
}

/** The bodies of /v1/chat/completions or /v1/completions, one a cell. The latter stops after 16 tokens by default. */
function bodies(run, {maxTokens}) {
  const first = (prompt) => (isChat(run) ? {messages: prompt} : {prompt, max_tokens: maxTokens});
  return run.prompts.flatMap((prompt) => run.params.map((own) => ({...first(prompt), ...run.shared, ...own})));
}
