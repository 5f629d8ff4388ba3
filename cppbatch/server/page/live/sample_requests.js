// What to do when nothing runs: a command to copy, and a button that sends 16 requests.
import {request} from '../api.js';
import {Button, CopyButton, EmptyState, html, toast, useState} from '../components.js';
import {plural, seconds} from '../format.js';

const GUIDE = 'You are a guide who answers visitors of a museum in a few friendly words, with a surprising fact.\n';
const ANIMALS = 'otters owls bees whales bats geckos ravens squids horses ants eels geese spiders wolves swifts toads';

/** One request with 16 prompts that share a prefix: 16 sequences of one batch. */
async function sendSamples(model) {
  const began = performance.now();
  const prompt = ANIMALS.split(' ').map((animal) => `${GUIDE.repeat(12)}What is special about ${animal}?`);
  const {usage} = await request('/v1/completions', {body: {model, prompt, max_tokens: 150, ignore_eos: true}});
  toast(`16 samples: ${plural(usage.completion_tokens, 'token')} in ${seconds((performance.now() - began) / 1000)}`);
}

function SampleButton({model}) {
  const [busy, setBusy] = useState(false);
  const send = () => {
    setBusy(true);
    sendSamples(model).catch((error) => toast(error.message, 'error')).finally(() => setBusy(false));
  };
  return html`<${Button} kind="primary" icon="send" disabled=${busy} onClick=${send}>Send 16 sample requests<//>`;
}

export function NothingRuns({keyed, name: model}) {
  const key = keyed ? "-H 'Authorization: Bearer YOUR-KEY' " : '';
  const command = `curl ${new URL('v1/completions', location.href)} ${key}-H 'Content-Type: application/json' `
    + `-d '{"model": "${model}", "prompt": "The sea is", "max_tokens": 200}'`;
  return html`<${EmptyState} title="Nothing is running" actions=${html`<${SampleButton} model=${model} />`}>
    <p>Each running request is a row here. Send 16 requests to see them computed together, or one from a terminal:</p>
    <div class="curl"><code>${command}</code><${CopyButton} text=${command} label="Copy the command" /></div>
  <//>`;
}
