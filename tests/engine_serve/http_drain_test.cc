#include "tests/routing/drain_test.cc"
