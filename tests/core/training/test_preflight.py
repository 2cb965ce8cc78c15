"""How the arguments of a trainer reach its base and its parts."""

from posttrain.core.training.preflight import Parts, passed_on


class Base:
    def __init__(self, model=None, tools=None, args=None, **more):
        self.given = {"model": model, "tools": tools, "args": args} | more


class InAnotherOrder(Base):
    def __init__(self, model=None, args=None, judge=None, **others):
        super().__init__(**passed_on(locals(), "judge"))


def test_arguments_are_passed_on_by_name_and_those_of_its_own_stay():
    made = InAnotherOrder("model", "args", "judge", tools=["tool"], callbacks=[])
    assert made.given == {"model": "model", "tools": ["tool"], "args": "args", "callbacks": []}


def test_parts_are_those_among_the_arguments():
    parts = Parts.of({"model": "model", "args": "args", "self": None, "peft_config": "adapter"}, ref_model="reference")
    assert parts == Parts(model="model", peft_config="adapter", ref_model="reference")
