// What gpudirect does, each part of it as one short program over the fake: for tests that let every
// call fail, and for those with an application beside it.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "tests/gpudirect/fake/fake_driver.h"

namespace baton::gpudirect {

struct Flow {
  const char* name;
  // OK: all was done and every byte is where it should be. DataLoss: nobody said an error, and it
  // is not. `driver`: the fake's table.
  absl::Status (*run)(FakeDriver& fake, const Driver& driver);
  Attributes (*attributes)() = h100;
};
std::span<const Flow> flows();

}  // namespace baton::gpudirect
