"""The row of the policy: what it is, and where its parts are."""

from xgpt.core.policies import Policy, Variable

WAVES = Policy(
    name="waves", title="Waves", words="a wave of queries is encoded, then decoded to its end",
    variables=(Variable(name="wave_queries", words="queries of a wave"),),
    controls="toy_waves.config:WavesControls", rules="toy_waves.rule:waves_rule")
