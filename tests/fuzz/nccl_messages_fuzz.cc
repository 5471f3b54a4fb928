// Fuzzes what two hubs of NCCL's plugin tell each other: what is taken is the same when it is
// written and read again.

#include "plugins/nccl/net_messages.h"
#include "tests/fuzz/expect.h"
#include "tests/std.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace baton;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto message = base::read_fields<nccl::NetMessage>(bytes, "a message");
  if (!message.ok()) return 0;
  expect(message->refused.why.size() <= base::kMaxWhy);
  std::string once, twice;
  base::write_fields(*message, once);
  const auto again = base::read_fields<nccl::NetMessage>(once, "a message");
  expect(again.ok() && once.size() == bytes.size());
  base::write_fields(*again, twice);
  expect(once == twice);
  return 0;
}
