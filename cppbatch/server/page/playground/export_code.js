// A run as a command, a program, or a batch file. No DOM.
//
// A run is the body of `POST /generate/batch`: {prompts, params, ...fields of all cells}. Its prompts are texts, or
// {messages}. A target is {origin, keyed, n_ctx}.

export const FORMATS = [
  {id: 'curl', label: 'curl', file: 'playground.sh', type: 'text/x-shellscript', write: curl},
  {id: 'python', label: 'Python', file: 'playground.py', type: 'text/x-python', write: python},
  {id: 'batch', label: 'batch file', file: 'playground.jsonl', type: 'application/jsonl', write: batchFile},
];

/** The cell with this index as a run, with the seed that its text had, or null. */
export function cellAlone(run, index, seed) {
  const {prompts, params} = run;
  const own = params[index % params.length];
  const prompt = prompts[Math.floor(index / params.length)];
  return {...run, prompts: [prompt], params: [seed === null ? own : {...own, seed}]};
}

/** JSON with each field on a line. */
const lines = (run) => `{\n${Object.entries(run).map(([name, value]) => `  "${name}": ${JSON.stringify(value)}`).join(',\n')}\n}`;

function curl(run, {origin, keyed}) {
  const header = keyed ? ' -H "Authorization: Bearer $CPPBATCH_API_KEY"' : '';
  return `curl ${origin}/generate/batch -H 'Content-Type: application/json'${header} -d '${
    lines(run).replaceAll("'", "'\\''")}'\n`;
}

function python(run, {origin, keyed}) {
  const header = keyed ? ', "Authorization": "Bearer " + os.environ["CPPBATCH_API_KEY"]' : '';
  const body = lines(run);
  const isPython = !/\b(true|false|null)\b/.test(body);
  return `import json
${keyed ? 'import os\n' : ''}import urllib.request

${isPython ? '' : 'true, false, null = True, False, None  # as in JSON\n'}body = ${body}
headers = {"Content-Type": "application/json"${header}}
request = urllib.request.Request("${origin}/generate/batch", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as answer:
    for result in json.load(answer)["results"]:
        print(result["index"], result.get("text", result.get("error")))
`;
}

/** One line a cell. /v1/completions stops after 16 tokens by default, and /generate/batch when the context is full. */
function batchFile({prompts, params, ...shared}, {n_ctx: longest}) {
  const requests = prompts.flatMap((prompt) => params.map((own) => (typeof prompt === 'string'
    ? {url: '/v1/completions', body: {prompt, max_tokens: longest, ...shared, ...own}}
    : {url: '/v1/chat/completions', body: {...prompt, ...shared, ...own}})));
  return requests.map((each, i) => `${JSON.stringify({custom_id: `cell-${i + 1}`, method: 'POST', ...each})}\n`).join('');
}
