// @ts-check
// The messages of a conversation: scrolling, and what a screen reader is told of a growing answer.
import {Button, Component, html, useEffect, useLayoutEffect, useRef, useState} from '../components.js';
import {pathOf, versionsOf} from './conversation.js';
import {Message} from './message.js';

const NEAR = 48; // pixels from the end within which the view follows the text
const ENOUGH = 100; // characters that are said at once

/** A message is rendered again only when something about it has changed. */
class Unchanged extends Component {
  shouldComponentUpdate(next) {
    return Object.keys(next).some((name) => next[name] !== this.props[name]);
  }

  render(props) {
    return html`<${Message} ...${props} />`;
  }
}

/** Follows the end of the text unless the reader has scrolled up. */
function useFollow(content) {
  const ref = useRef(null);
  const isFollowing = useRef(true);
  const seenTop = useRef(0);
  const [isAtEnd, setAtEnd] = useState(true);
  /** The event of a scroll comes up to a frame after it: text may have grown since, which is not the reader's doing. */
  const look = () => {
    const {scrollHeight, scrollTop, clientHeight} = ref.current;
    const isNear = scrollHeight - scrollTop - clientHeight < NEAR;
    if (isNear || scrollTop < seenTop.current) isFollowing.current = isNear;
    seenTop.current = scrollTop;
  };
  const toEnd = () => {
    ref.current.scrollTop = ref.current.scrollHeight;
    seenTop.current = ref.current.scrollTop;
  };
  const follow = () => {
    look();
    if (isFollowing.current) toEnd();
  };
  useEffect(() => {
    const element = ref.current;
    const onScroll = () => {
      look();
      setAtEnd(isFollowing.current);
    };
    const observer = new ResizeObserver(follow);
    element.addEventListener('scroll', onScroll, {passive: true});
    observer.observe(element);
    observer.observe(element.firstElementChild);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(follow, [content]);
  return {ref, isAtEnd, toEnd};
}

/** Says the sentences of an answer as they are complete, each once. */
function Spoken({message, isRunning}) {
  const said = useRef({id: null, length: 0});
  const [text, setText] = useState('');
  useEffect(() => {
    if (message.id !== said.current.id) said.current = {id: message.id, length: isRunning ? 0 : message.content.length};
    const rest = message.content.slice(said.current.length);
    const end = isRunning ? /^[^]*[.!?:\n]\s/.exec(rest)?.[0].length ?? 0 : rest.length;
    if (!end || (isRunning && end < ENOUGH)) return;
    said.current.length += end;
    setText(rest.slice(0, end));
  }, [message, isRunning]);
  return html`<div class="hidden-text" aria-live="polite">${text}</div>`;
}

export function Messages({conversation, actions, health, model, running}) {
  const path = pathOf(conversation);
  const last = path.at(-1);
  const {ref, isAtEnd, toEnd} = useFollow(conversation);
  return html`<div class="messages" ref=${ref} tabindex="0" role="region" aria-label="Messages">
      <div class="messages-inner">${path.map((message) => {
        const versions = versionsOf(conversation, message.parent);
        return html`<${Unchanged} key=${message.id} message=${message} actions=${actions}
          at=${versions.indexOf(message)} of=${versions.length} isLast=${message === last}
          isRunning=${message.id === running} isBusy=${Boolean(running)} health=${message.error || message.id === running ? health : null}
          model=${message.id === running ? model : null} />`;
      })}</div>
      ${!isAtEnd && html`<${Button} icon="down" class="to-end" label="Scroll to end" onClick=${toEnd} />`}
    </div>
    ${last.role === 'assistant' && html`<${Spoken} message=${last} isRunning=${last.id === running} />`}`;
}
