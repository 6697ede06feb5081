"""``ortserve optimize``: a model made faster or smaller by steps that are each checked against it."""
