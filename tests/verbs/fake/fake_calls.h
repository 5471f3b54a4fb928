// The fake's table of calls, in parts: each file has the calls of one kind of object.
#pragma once

#include <mutex>

#include "tests/verbs/fake/fake_objects.h"

namespace baton {

// What every call begins with.
struct FakeCall {
  using Lock = std::lock_guard<std::mutex>;
  static FakeVerbs& of(ibv_context* context) { return *fake_of_context(context).fake; }
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
