from tests.support import __doc__ as doc
def test_a():
    assert doc
