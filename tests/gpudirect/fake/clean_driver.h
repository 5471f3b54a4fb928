// The fake of tests at whose end nothing is left and no rule was broken.
#pragma once

#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/must.h"
#include "tests/test.h"

namespace baton::gpudirect {

// Before all that uses it.
class CleanDriver : public FakeDriver {
 public:
  using FakeDriver::FakeDriver;
  ~CleanDriver() { EXPECT_THAT(finish(), testing::IsEmpty()); }
};

}  // namespace baton::gpudirect
