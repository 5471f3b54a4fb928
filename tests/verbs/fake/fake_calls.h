// The fake's table of calls, in parts: each file has the calls of one kind of object.
#pragma once

#include <cerrno>
#include <mutex>

#include "tests/verbs/fake/fake_objects.h"

namespace baton {

// What every call begins with.
struct FakeCall {
  static FakeVerbs& of(ibv_context* context) { return *fake_of_context(context).fake; }
  static std::nullptr_t failed(int error) {
    errno = error;
    return nullptr;
  }
  using Lock = std::lock_guard<std::mutex>;
  // The fake of a context, for this call alone.
  class Locked {
   public:
    explicit Locked(ibv_context* context) : fake_(of(context)), lock_(fake_.mutex_) {}
    FakeVerbs* operator->() const { return &fake_; }

   private:
    FakeVerbs& fake_;
    const Lock lock_;
  };
};

void add_device_calls(verbs::VerbsApi& api);      // fake_devices.cc
void add_memory_calls(verbs::VerbsApi& api);      // fake_memory.cc
void add_completion_calls(verbs::VerbsApi& api);  // fake_completions.cc
void add_queue_calls(verbs::VerbsApi& api);       // fake_queues.cc

// Those that libibverbs reaches through a context.
void add_completion_calls(ibv_context_ops& ops);
void add_queue_calls(ibv_context_ops& ops);

// One count off an eventfd; false where there is none.
bool take_count(int fd);

}  // namespace baton
