// @ts-check
// The title and the tags of a conversation.
import {Button, Dialog, Field, html, useState} from '../components.js';

export function Rename({conversation, onChange, onEnd}) {
  const [title, setTitle] = useState(conversation.title);
  const [tags, setTags] = useState((conversation.tags ?? []).join(', '));
  const submit = (event) => {
    event.preventDefault();
    const words = tags.split(',').map((tag) => tag.trim().replace(/^#/, '').replace(/\s+/g, '-')).filter(Boolean);
    onChange({...conversation, title: title.trim(), tags: [...new Set(words)]});
    onEnd();
  };
  return html`<${Dialog} open title="Rename and tag" onClose=${onEnd}><form onSubmit=${submit}>
    <${Field} label="Title">
      <input required autofocus value=${title} onInput=${({target}) => setTitle(target.value)} /><//>
    <${Field} label="Tags" help="Separated by commas. The search finds them as #tag.">
      <input value=${tags} spellcheck=${false} onInput=${({target}) => setTags(target.value)} /><//>
    <div class="row end"><${Button} onClick=${onEnd}>Cancel<//>
      <${Button} kind="primary" type="submit">Save<//></div>
  </form><//>`;
}
