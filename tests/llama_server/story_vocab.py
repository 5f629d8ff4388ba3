from cppbatch.models.synthetic import GgufVocab, byte_vocab


def story_vocab() -> GgufVocab:
    return byte_vocab()
