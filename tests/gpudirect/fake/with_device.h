// Tests of what runs on a device of the fake driver: the device, its kernels, and at the end
// nothing is left and no rule was broken.
#pragma once

#include "gpudirect/device.h"
#include "gpudirect/launcher.h"
#include "tests/gpudirect/fake/clean_driver.h"

namespace baton::gpudirect {

class WithDevice : public testing::Test {
 protected:
  explicit WithDevice(FakeOptions options = {})
      : fake_(std::move(options)),
        device_(*Device::open(FakeDriver::driver(), 0)),
        launcher_(*Launcher::load(*device_, FakeDriver::image())) {}

  CleanDriver fake_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Launcher> launcher_;
};

inline void write_floats(FakeDriver& fake, DevicePointer at, const std::vector<float>& values) {
  fake.write(at, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
}
inline std::vector<float> read_floats(FakeDriver& fake, DevicePointer at, size_t count) {
  const std::string bytes = fake.read(at, count * sizeof(float));
  std::vector<float> out(count);
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

}  // namespace baton::gpudirect
