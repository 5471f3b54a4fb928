// The fake driver as the one that this process's workers find, also in children that are forked.
#pragma once

#include "gpudirect/contract/memory_place.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/gpudirect/fake/made_up_costs.h"
#include "tests/must.h"
#include "tests/test.h"

namespace baton::gpudirect {

class InstalledFake {
 public:
  explicit InstalledFake(FakeOptions options = {},
                         const CudaMemory::Options& memory = options_of_this_test())
      : before_(internal::device_memory()),
        fake_(std::move(options)),
        driver_(FakeDriver::driver()),
        memory_(std::make_unique<CudaMemory>([this] { return &driver_; }, memory)) {
    internal::use_device_memory(memory_.get());
  }
  ~InstalledFake() { internal::use_device_memory(before_); }
  InstalledFake(const InstalledFake&) = delete;
  InstalledFake& operator=(const InstalledFake&) = delete;

  FakeDriver& fake() { return fake_; }
  const CudaMemory& memory() const { return *memory_; }
  // What that calls: a test may have something else called before anybody does.
  Driver& driver() { return driver_; }
  // Everything that used devices has ended: no violation, and nothing is left.
  void expect_clean() {
    memory_.reset();
    internal::use_device_memory(before_);
    EXPECT_THAT(fake_.finish(), testing::IsEmpty());
  }

 private:
  const internal::DeviceMemory* const before_;
  FakeDriver fake_;
  Driver driver_;
  std::unique_ptr<CudaMemory> memory_;
};

// Before all that uses devices: at its end all of that has ended.
class CleanFake : public InstalledFake {
 public:
  using InstalledFake::InstalledFake;
  ~CleanFake() { expect_clean(); }
};

}  // namespace baton::gpudirect
