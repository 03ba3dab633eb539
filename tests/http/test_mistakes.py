"""Common mistakes of new users: each answer says what came, what is wanted, and the fix. The table of mistakes is in
mistakes.py."""
import pytest

import mistakes


@pytest.fixture(scope='module')
def servers(tmp_path_factory):
    tokens = tmp_path_factory.mktemp('mistakes') / 'tokens'
    tokens.write_text(mistakes.TOKEN + '\n')
    started = {}

    def of(name):
        if name not in started:
            started[name] = mistakes.start(name, tokens).start()
        return started[name]
    yield of
    for server in started.values():
        server.stop()


@pytest.mark.parametrize('mistake', mistakes.ROWS, ids=[m.name for m in mistakes.ROWS])
def test_the_answer_names_what_came_what_is_wanted_and_the_cure(servers, mistake):
    answer = mistakes.ask(servers(mistake.server), mistake)
    assert mistakes.falls_short(mistake, answer) is None, f'{answer.status} {answer.body.decode()}'


def test_no_mistake_stands_twice_in_the_table():
    names = [mistake.name for mistake in mistakes.ROWS]
    assert len(names) == len(set(names))
