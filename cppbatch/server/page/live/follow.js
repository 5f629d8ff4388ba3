// Follows a stream, and opens it again when it breaks. No DOM.

const PAUSES = [0.5, 1, 2, 4, 8]; // seconds before the next try, by tries that failed in a row

/** Runs until `signal` is aborted or the server refuses. `onState` gets {} with each event of `open(signal)`, {message,
 * pause} when two tries have failed (the next one is in `pause` seconds), {message} when the server refuses. */
export async function follow(open, signal, onEvent, onState, pauses = PAUSES) {
  for (let failures = 1; !signal.aborted; failures += 1) {
    let message = 'It has ended the stream.';
    try {
      for await (const event of open(signal)) {
        if (signal.aborted) return;
        failures = 0;
        onState({});
        onEvent(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      ({message} = error);
      if (error.status >= 400 && ![429, 503].includes(error.status)) return onState({message});
    }
    const pause = pauses[Math.min(failures, pauses.length - 1)];
    if (failures) onState({message, pause});
    await new Promise((resolve) => {
      const wait = setTimeout(resolve, pause * 1000);
      signal.addEventListener('abort', () => resolve(clearTimeout(wait)), {once: true});
    });
  }
}
