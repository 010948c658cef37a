"""A token bucket limits how often something happens."""

from vramledger.rate_limit import TokenBucket


def test_a_bucket_fills_with_time() -> None:
    """As many tokens as a burst can be consumed at once, then as many as the rate."""
    bucket = TokenBucket(0.0, rate=4.0, burst=16.0)
    assert [bucket.consume(0.0) for _ in range(17)] == [True] * 16 + [False]
    assert bucket.wait == 0.25
    assert bucket.consume(0.25)
    assert not bucket.consume(0.25)
    assert bucket.is_full(100.0)


def test_a_look_at_a_bucket_leaves_it_as_it_is() -> None:
    """A query consumes nothing; a time before the last one fills nothing and empties nothing."""
    bucket = TokenBucket(0.0, rate=1.0, burst=1.0)
    assert not bucket.is_empty(0.0)
    assert bucket.is_full(0.0)
    assert bucket.consume(0.0)
    assert bucket.is_empty(0.5)
    assert not bucket.is_empty(1.0)
    bucket = TokenBucket(10.0, rate=1.0, burst=2.0)
    assert bucket.consume(10.0)
    assert bucket.consume(5.0)
    assert not bucket.consume(5.0)
