// @ts-check
// Images, audio and texts of a message: read from files (the text of a PDF by the server), images made smaller.
//
//   readMedia(file, modalities) -> medium {kind: 'image' | 'audio', name, url}, or {kind: 'text', name, text}
//   url: a data URL, kept with the message
//   modalities: of GET /props. The API's form of a medium is made by conversation.js.
import {dataUrl, documentTexts, isPdf} from '../documents.js';
import {bytes} from '../format.js';

const LONGEST_SIDE = 1536; // pixels; models scale larger images down
const LARGEST = 16 * 2 ** 20; // bytes of sound, which is not made smaller
const LARGEST_TEXT = 2 ** 20; // bytes
const IMAGES = ['image/png', 'image/jpeg', 'image/webp', 'image/gif', 'image/bmp']; // which the server reads
const SOUNDS = {'audio/wav': 'wav', 'audio/x-wav': 'wav', 'audio/wave': 'wav', 'audio/mpeg': 'mp3', 'audio/mp3': 'mp3',
  'audio/flac': 'flac', 'audio/x-flac': 'flac'};
const NAMES = {image: 'images', audio: 'audio'};
const FLAG = {image: 'vision', audio: 'audio'};

/** Throws Error with what is wrong with the file, or with the model. */
export async function readMedia(file, modalities) {
  const kind = file.type.startsWith('image/') ? 'image' : 'audio';
  if (kind === 'audio' && !(file.type in SOUNDS)) return readText(file);
  if (!modalities?.[FLAG[kind]]) throw new Error(`this model does not accept ${NAMES[kind]}`);
  if (kind === 'audio' && file.size > LARGEST) {
    throw new Error(`it has ${bytes(file.size)}; the limit for audio is ${bytes(LARGEST)}`);
  }
  const content = kind === 'image' ? await scaled(file) : file;
  return {kind, name: file.name || NAMES[kind], url: await dataUrl(content)};
}

async function readText(file) {
  if (await isPdf(file)) {
    const {files: [found], skipped: [why]} = await documentTexts(file);
    if (!found) throw new Error(`it ${why.reason}`);
    return {kind: 'text', name: file.name, text: found.text};
  }
  if (file.size > LARGEST_TEXT) throw new Error(`it has ${bytes(file.size)}; the limit for text is ${bytes(LARGEST_TEXT)}`);
  let text = '\0';
  try {
    text = new TextDecoder('utf-8', {fatal: true}).decode(await file.arrayBuffer());
  } catch { /* not UTF-8 */ }
  if (text.includes('\0')) throw new Error('it is neither UTF-8 text nor a PDF nor an image nor a WAV, MP3 or FLAC file');
  if (!text.trim()) throw new Error('it is empty');
  return {kind: 'text', name: file.name || 'text', text};
}

/** The image; a large one scaled down, and one of a type that the server does not read, as PNG. */
async function scaled(file) {
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error('the browser cannot decode this image');
  });
  const factor = Math.min(1, LONGEST_SIDE / Math.max(picture.width, picture.height));
  if (factor === 1 && IMAGES.includes(file.type)) return file;
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(picture.width * factor)),
    Math.max(1, Math.round(picture.height * factor)));
  const context = canvas.getContext('2d');
  context.imageSmoothingQuality = 'high';
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.convertToBlob({type: file.type === 'image/jpeg' ? file.type : 'image/png', quality: 0.9});
}
