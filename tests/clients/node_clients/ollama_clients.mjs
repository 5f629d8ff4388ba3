// Clients of Ollama's API from npm, against the server at OLLAMA_TEST_URL. Prints one JSON object for each client.
import assert from 'node:assert/strict';
import {ChatOllama, OllamaEmbeddings} from '@langchain/ollama';
import {generateText, streamText} from 'ai';
import {Ollama} from 'ollama';
import {createOllama} from 'ollama-ai-provider-v2';

const {OLLAMA_TEST_URL: url, OLLAMA_TEST_EMBEDDINGS: embeddings, OLLAMA_TEST_MODEL: model, OLLAMA_TEST_KEY: key} = process.env;
const headers = {Authorization: `Bearer ${key}`};
const question = 'Name the capital of France.';
const messages = [{role: 'user', content: question}];
const options = {temperature: 0, num_predict: 24};
const schema = {type: 'object', properties: {days: {type: 'integer', minimum: 1, maximum: 5}}, required: ['days']};

const join = async (stream, textOf) => {
  let text = '';
  for await (const part of stream) text += textOf(part);
  return text;
};

const official = async () => {
  const client = new Ollama({host: url, headers});
  const whole = await client.chat({model, messages, options});
  const streamed = await join(await client.chat({model, messages, options, stream: true}), part => part.message.content);
  assert.equal(streamed, whole.message.content);
  assert.equal(whole.done_reason, 'stop');
  const filled = await client.chat({model, messages, format: schema, options: {num_predict: 64}});
  assert.ok(JSON.parse(filled.message.content).days >= 1);
  const generated = await client.generate({model, prompt: question, options});
  assert.equal(generated.response, whole.message.content);
  const {models} = await client.list();
  assert.ok((await client.show({model: models[0].name})).capabilities.includes('completion'));
  assert.equal((await client.ps()).models[0].name, models[0].name);
  assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
  assert.equal((await client.pull({model: models[0].name})).status, 'success');
  const vectors = await new Ollama({host: embeddings, headers}).embed({model, input: ['a', 'b']});
  assert.equal(vectors.embeddings.length, 2);
  await assert.rejects(client.chat({model, messages, options: {top_p: 7}}), /options\.top_p: is 7/);
  await assert.rejects(client.copy({source: models[0].name, destination: 'x'}), /--models-dir/);
  const stream = await client.chat({model, messages, options: {num_predict: 2000, ignore_eos: true}, stream: true});
  await assert.rejects(join(stream, () => (stream.abort(), '')), {name: 'AbortError'});
  return whole.message.content;
};

const langchain = async () => {
  const chat = new ChatOllama({baseUrl: url, model, temperature: 0, numPredict: 24, headers});
  const whole = await chat.invoke(question);
  assert.equal(await join(await chat.stream(question), chunk => chunk.content), whole.content);
  assert.ok(whole.usage_metadata.total_tokens > whole.usage_metadata.output_tokens);
  const filled = await new ChatOllama({baseUrl: url, model, numPredict: 64, headers})
    .withStructuredOutput(schema, {method: 'jsonSchema'}).invoke(question);
  assert.ok(filled.days >= 1);
  const embed = new OllamaEmbeddings({baseUrl: embeddings, model, headers});
  assert.equal((await embed.embedDocuments(['a', 'b'])).length, 2);
  return whole.content;
};

const vercel = async () => {
  const provider = createOllama({baseURL: `${url}/api`, headers});
  // Its own temperature is a field outside `options`, which Ollama ignores too.
  const asked = {model: provider(model), prompt: question, providerOptions: {ollama: {options}}};
  const whole = await generateText(asked);
  assert.equal(await join(streamText(asked).textStream, text => text), whole.text);
  assert.ok(whole.usage.outputTokens > 0);
  return whole.text;
};

for (const [name, run] of Object.entries({official, langchain, vercel})) {
  console.log(JSON.stringify({name, text: await run()}));
}
