// @ts-check
// Follows a stream, and opens it again when it breaks. No DOM.

const PAUSES = [0.5, 1, 2, 4, 8]; // seconds before the next try, by tries that failed in a row
const SILENCE = 10; // seconds without an event after which a stream is taken for broken

/**
 * Runs until `signal` is aborted or the server refuses. `open(signal)`: an async iterable of events. `onState`: gets
 * {name: 'open'}, {name: 'gone', message, pause} (tried again in `pause` seconds) or {name: 'refused', message}.
 */
export async function follow(open, signal, onEvent, onState, {pauses = PAUSES, silence = SILENCE} = {}) {
  let failures = 0;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener('abort', stop);
    let timer = setTimeout(stop, silence * 1000);
    let message = 'it ended the stream';
    try {
      for await (const event of open(attempt.signal)) {
        if (signal.aborted) return;
        clearTimeout(timer);
        timer = setTimeout(stop, silence * 1000);
        failures = 0;
        onState({name: 'open'});
        onEvent(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status >= 400 && ![429, 503].includes(error.status)) return onState({name: 'refused', message: error.message});
      message = attempt.signal.aborted ? `nothing came for ${silence} s` : error.message;
    } finally {
      clearTimeout(timer);
      stop();
      signal.removeEventListener('abort', stop);
    }
    const pause = pauses[Math.min(failures, pauses.length - 1)];
    failures += 1;
    onState({name: 'gone', message, pause});
    await new Promise((resolve) => {
      const wait = setTimeout(resolve, pause * 1000);
      signal.addEventListener('abort', () => resolve(clearTimeout(wait)), {once: true});
    });
  }
}
