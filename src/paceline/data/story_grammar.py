"""The grammar of `stories`: it writes stories, and parses them sentence by sentence.

A story is one line of four or five sentences. What makes it hard for models with a short context is
agreement: verbs agree in number with a subject that other nouns separate from them, pronouns with
the name in the first sentence, and things, adjectives and places return in later sentences.

    Nora had an old drum. The geese that the child follows wait. She took the old drum to the hill.
    At the hill she lost her drum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

GRAMMAR_VERSION = 1
"""Changes whenever the same random numbers give other stories."""
NUMBERS_PER_STORY = 24
"""Random numbers that `write_story` uses."""

NAMES = {
    "She": ("Anna", "Clara", "Emma", "Julia", "Lily", "Mia", "Nora", "Rosa"),
    "He": ("Adam", "Ben", "Felix", "Jack", "Leo", "Max", "Oscar", "Tom"),
}
POSSESSIVES = {"She": "her", "He": "his"}
ADJECTIVES = ("big", "blue", "empty", "green", "new", "old", "red", "small")
THINGS = ("ball", "bell", "boat", "book", "coat", "cup", "drum", "hat", "kite", "lamp")
PLACES = ("barn", "bridge", "forest", "garden", "hill", "lake", "market", "river")
NOUNS = (
    ("bird", "birds"),
    ("boy", "boys"),
    ("cat", "cats"),
    ("child", "children"),
    ("dog", "dogs"),
    ("farmer", "farmers"),
    ("fox", "foxes"),
    ("girl", "girls"),
    ("goose", "geese"),
    ("horse", "horses"),
    ("mouse", "mice"),
)
"""Singular and plural."""
VERBS = (
    ("hides", "hide"),
    ("jumps", "jump"),
    ("runs", "run"),
    ("sings", "sing"),
    ("sleeps", "sleep"),
    ("waits", "wait"),
)
TRANSITIVE_VERBS = (
    ("chases", "chase"),
    ("follows", "follow"),
    ("hears", "hear"),
    ("likes", "like"),
    ("sees", "see"),
)
PREPOSITIONS = ("behind", "beside", "near", "under")

_VOWELS = "aeiou"
_NOUN_NUMBER = {word: number for pair in NOUNS for number, word in enumerate(pair)}
_VERB_NUMBER = {word: number for pair in VERBS for number, word in enumerate(pair)}
_TRANSITIVE_NUMBER = {word: number for pair in TRANSITIVE_VERBS for number, word in enumerate(pair)}
_PRONOUN_OF = {name: pronoun for pronoun, names in NAMES.items() for name in names}


def write_story(numbers: Sequence[int]) -> str:
    """Return the story of NUMBERS_PER_STORY random numbers, a line that ends with a line break."""
    draw = iter(numbers).__next__
    pronoun = ("She", "He")[draw() % 2]
    names = NAMES[pronoun]
    name = names[draw() % len(names)]
    adjective = ADJECTIVES[draw() % len(ADJECTIVES)]
    thing = THINGS[draw() % len(THINGS)]
    place = PLACES[draw() % len(PLACES)]
    scenes = " ".join([_write_scene(draw) for _ in range(1 + draw() % 2)])
    possessive = POSSESSIVES[pronoun]
    if draw() % 2:
        ending = f"At the {place} {pronoun.lower()} lost {possessive} {thing}."
    else:
        ending = f"{name} left {possessive} {adjective} {thing} there."
    return (
        f"{name} had {_article(adjective)} {adjective} {thing}. {scenes}"
        f" {pronoun} took the {adjective} {thing} to the {place}. {ending}\n"
    )


def _write_scene(draw: Callable[[], int]) -> str:
    """Return a sentence whose verb is separated from its subject by other nouns."""
    kind, number, other = draw() % 3, draw() % 2, draw() % 2
    subject, noun = NOUNS[draw() % len(NOUNS)][number], NOUNS[draw() % len(NOUNS)][other]
    verb = VERBS[draw() % len(VERBS)][number]
    chosen = draw()
    if kind:
        transitive = TRANSITIVE_VERBS[chosen % len(TRANSITIVE_VERBS)][other]
        return f"The {subject} that the {noun} {transitive} {verb}."
    return f"The {subject} {PREPOSITIONS[chosen % len(PREPOSITIONS)]} the {noun} {verb}."


def _article(adjective: str) -> str:
    return "an" if adjective[0] in _VOWELS else "a"


class GrammarError(ValueError):
    """A sentence that the grammar does not produce, with the reason."""


@dataclass(frozen=True, slots=True)
class ParsedSentence:
    text: str
    problem: str | None
    """Why it is not grammatical; None if it is."""


def parse(text: str) -> list[ParsedSentence]:
    """Parse each sentence of complete stories; an unfinished last line is ignored."""
    stories = text.split("\n")[:-1]
    return [sentence for story in stories if story for sentence in _parse_story(story)]


def grammatical_fraction(text: str) -> float:
    """Return the fraction of sentences of complete stories that are grammatical; 0 without any."""
    sentences = parse(text)
    return sum(one.problem is None for one in sentences) / max(1, len(sentences))


def _parse_story(story: str) -> list[ParsedSentence]:
    parser = _StoryParser()
    # The space belongs to the previous sentence, so that other separators are errors.
    sentences = re.findall(r"[^.]*\.(?: (?=.))?|[^.]+$", story)
    parsed = []
    for number, sentence in enumerate(sentences, 1):
        try:
            parser.read(sentence.removesuffix(" "), is_last=number == len(sentences))
            problem = None
        except GrammarError as error:
            problem = str(error)
        parsed.append(ParsedSentence(sentence, problem))
    return parsed


class _StoryParser:
    """Knows what the earlier sentences of a story have introduced."""

    def __init__(self) -> None:
        self._sentences = 0
        self._scenes = 0
        self._name = self._pronoun = self._adjective = self._thing = self._place = ""

    def read(self, sentence: str, *, is_last: bool) -> None:
        """Parse the next sentence; raises GrammarError."""
        self._sentences += 1
        if not re.fullmatch(r"[A-Za-z]+( [a-zA-Z]+)*\.", sentence):
            raise GrammarError("not words, single spaces and a final period")
        words = _Words(sentence[:-1].split(" "))
        if self._sentences == 1:
            self._introduction(words)
        elif is_last:
            self._ending(words)
        elif words.starts_with("The"):
            self._scene(words)
        else:
            self._journey(words)
        words.end()

    def _introduction(self, words: _Words) -> None:
        self._name = words.one_of(_PRONOUN_OF, "a name")
        self._pronoun = _PRONOUN_OF[self._name]
        words.expect("had")
        article = words.one_of(("a", "an"), "an article")
        self._adjective = words.one_of(ADJECTIVES, "an adjective")
        self._thing = words.one_of(THINGS, "a thing")
        if article != _article(self._adjective):
            raise GrammarError(f"{article} {self._adjective}: the article does not agree")

    def _scene(self, words: _Words) -> None:
        self._scenes += 1
        if self._scenes > 2 or self._place:
            raise GrammarError("a scene in the wrong place")
        words.expect("The")
        subject = words.one_of(_NOUN_NUMBER, "a noun")
        link = words.one_of((*PREPOSITIONS, "that"), "a preposition or that")
        words.expect("the")
        other = words.one_of(_NOUN_NUMBER, "a noun")
        if link == "that":
            transitive = words.one_of(_TRANSITIVE_NUMBER, "a transitive verb")
            _check_number(other, _NOUN_NUMBER[other], transitive, _TRANSITIVE_NUMBER[transitive])
        verb = words.one_of(_VERB_NUMBER, "a verb")
        _check_number(subject, _NOUN_NUMBER[subject], verb, _VERB_NUMBER[verb])

    def _journey(self, words: _Words) -> None:
        if not self._scenes or self._place:
            raise GrammarError("a journey in the wrong place")
        # Known to the ending even if this sentence has an error, which then counts once.
        self._place = words.last if words.last in PLACES else ""
        for word in (self._pronoun, "took", "the", self._adjective, self._thing, "to", "the"):
            words.expect(word)
        words.one_of(PLACES, "a place")

    def _ending(self, words: _Words) -> None:
        if not self._place:
            raise GrammarError("an ending without a journey")
        # Empty if the introduction has an error.
        possessive = POSSESSIVES.get(self._pronoun, "")
        if words.starts_with("At"):
            pronoun = self._pronoun.lower()
            expected = ["At", "the", self._place, pronoun, "lost", possessive, self._thing]
        else:
            expected = [self._name, "left", possessive, self._adjective, self._thing, "there"]
        for word in expected:
            words.expect(word)


def _check_number(noun: str, noun_number: int, verb: str, verb_number: int) -> None:
    if noun_number != verb_number:
        raise GrammarError(f"{noun} ... {verb}: the verb does not agree")


class _Words:
    """The words of a sentence that are left to parse."""

    def __init__(self, words: list[str]) -> None:
        self._left = list(reversed(words))

    @property
    def last(self) -> str:
        return self._left[0]

    def starts_with(self, word: str) -> bool:
        return bool(self._left) and self._left[-1] == word

    def expect(self, word: str) -> None:
        found = self._left.pop() if self._left else "the end"
        if found != word or not word:
            raise GrammarError(f"expected {word or 'an introduction before'}, found {found}")

    def one_of(self, words: Container[str], kind: str) -> str:
        found = self._left.pop() if self._left else ""
        if found not in words:
            raise GrammarError(f"expected {kind}, found {found or 'the end'}")
        return found

    def end(self) -> None:
        if self._left:
            raise GrammarError(f"expected the end, found {self._left[-1]}")
