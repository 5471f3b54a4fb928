// Contexts that an application has made beside the primary one, and what is theirs.
#include <algorithm>

#include "tests/gpudirect/fake/fake_driver.h"

namespace baton::gpudirect {

Context FakeDriver::primary(int device) {
  return reinterpret_cast<Context>(static_cast<uintptr_t>(device + 1));
}

Context FakeDriver::make_context(int device) {
  const std::lock_guard lock(mutex_);
  const uintptr_t number = contexts_.size() + 1;
  const auto made = reinterpret_cast<Context>(number << 8 | static_cast<uintptr_t>(device + 1));
  contexts_.insert(made);
  return made;
}

void FakeDriver::destroy_context(Context context) {
  std::vector<DevicePointer> memory;
  {
    const std::lock_guard lock(mutex_);
    lost_contexts_[context] = kContextIsDestroyed;
    for (const auto& [at, mapping] : mappings_) {
      if (mapping.home == context) memory.push_back(at);
    }
    const auto gone = [&](const auto& made) {
      const auto home = homes_.find(made.first);
      return home != homes_.end() && home->second == context;
    };
    std::erase_if(streams_, gone);
    std::erase_if(events_, gone);
  }
  for (const DevicePointer at : memory) free(at);
}

void FakeDriver::lose_context(Context context) {
  const std::lock_guard lock(mutex_);
  lost_contexts_[context] = kIllegalAddress;
}

DevicePointer FakeDriver::allocate_in(Context context, size_t bytes) {
  const DevicePointer at = allocate(bytes, device_of(context));
  const std::lock_guard lock(mutex_);
  mappings_[at].home = context;
  return at;
}

Result FakeCall::loss_of(const void* object) const {
  const auto home = fake.homes_.find(object);
  if (home == fake.homes_.end()) return kSuccess;
  const auto lost = fake.lost_contexts_.find(home->second);
  return lost == fake.lost_contexts_.end() ? kSuccess : lost->second;
}

bool FakeDriver::reached_from(Context context, DevicePointer at) {
  const auto mapping = mapping_at(at);
  return mapping == mappings_.end() || mapping->second.home == nullptr ||
         mapping->second.home == context;
}

}  // namespace baton::gpudirect
