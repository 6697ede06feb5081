"""``ortserve optimize``: makes a model faster or smaller by steps. Each step is checked against the source."""
