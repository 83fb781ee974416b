"""A game of two that the model plays against itself, by the package `openai` alone: who takes the last stone wins.

The players take one to three stones in turn. Each has a session of its own (a sub-agent of that name) and a reward of
its own: 1 for a win, -1 for a loss, which a move that the rules do not have is too. What the model reads is the moves
there are and the pile, `sort:1236=`; what it writes, one character, is its move. Who leaves four can win.
"""

from openai import OpenAI

PLAYERS = ("first", "second")


def run(base_url: str, api_key: str, task: dict) -> dict[str, float]:
    """Plays a game; returns which share of its moves were legal, and of those that could keep a win which did.

    It opens with two stones fewer than the task's prompt has digits: two to six.
    """
    pile, turn, legal, kept = len(task["prompt"]) - len("sort:=") - 2, 0, [], []
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        opened = [client.post("/sub_agents", cast_to=dict, body={"name": name}) for name in PLAYERS]
        players = [client.with_options(base_url=session["base_url"]) for session in opened]
        while pile and all(legal):
            moves = "123"[:pile]
            prompt = f"sort:{moves}{pile}="
            move = players[turn % 2].completions.create(model="any", prompt=prompt, max_tokens=1).choices[0].text
            legal.append(move != "" and move in moves)
            if pile % 4:
                kept.append(move == str(pile % 4))
            pile, turn = pile - int(move) if legal[-1] else pile, turn + 1
        last = (turn - 1) % 2
        winner = last if all(legal) else 1 - last
        for number, player in enumerate(players):
            player.post("/reward", cast_to=object, body={"reward": 1.0 if number == winner else -1.0})
    return {"optimal": sum(kept) / len(kept) if kept else 1.0, "legal": sum(legal) / len(legal)}
