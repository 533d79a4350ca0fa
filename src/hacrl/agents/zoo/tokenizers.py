"""Three tokenizers for the arithmetic task that cut the same text into different tokens.

char   one token a character            47+38=85;   4 7 + 3 8 = 8 5 ;
pair   digits two at a time             47+38=85;   47 + 38 = 85 ;
bpe    merges learned on worked text    47+38=85;   47 +3 8 =8 5 ;   (for example)
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hacrl.tasks.arithmetic import ArithmeticTask, worked_answer

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL = [PAD, BOS, EOS, UNK]
DIGITS = list("0123456789")
SYMBOLS = list("+-=;#")
BPE_VOCABULARY = 128
BPE_TEXTS = 20_000

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    if name == "char":
        backend = word_level(DIGITS + SYMBOLS, r"[\s\S]")
    elif name == "pair":
        pairs = [first + second for first in DIGITS for second in DIGITS]
        backend = word_level(DIGITS + pairs + SYMBOLS, r"\d{1,2}|[^\d]")
    elif name == "bpe":
        problems = ArithmeticTask(seed=0).train(0, BPE_TEXTS)
        backend = byte_pair(f"{problem.prompt}{worked_answer(problem)}" for problem in problems)
    else:
        raise ValueError(f"no tokenizer is called {name!r}; there are char, pair and bpe")
    # The default decoder puts spaces between tokens.
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def word_level(words: list[str], pattern: str) -> Tokenizer:
    """Every match of the pattern is one token."""
    vocabulary = {word: index for index, word in enumerate(SPECIAL + words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return backend


def byte_pair(texts: Iterable[str]) -> Tokenizer:
    """Merges stay within a number and the sign before it."""
    backend = Tokenizer(models.BPE(unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\d]?\d+|[^\d]"), behavior="isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=DIGITS + SYMBOLS,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend
