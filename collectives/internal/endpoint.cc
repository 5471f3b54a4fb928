// What a process shares among its communicators: its public calls.
#include "collectives/endpoint.h"

namespace baton {

namespace collectives::internal {
class EndpointImpl {};
}  // namespace collectives::internal

absl::StatusOr<Handle> Handle::decode(std::string_view) {
  return absl::UnimplementedError("handles are not there yet");
}
std::string Handle::label() const { return ""; }

Endpoint::Endpoint(std::unique_ptr<collectives::internal::EndpointImpl> impl)
    : impl_(std::move(impl)) {}
Endpoint::~Endpoint() = default;
absl::StatusOr<std::shared_ptr<Endpoint>> Endpoint::open(EndpointOptions) {
  return absl::UnimplementedError("endpoints are not there yet");
}
const Handle& Endpoint::handle() const {
  static const Handle none;
  return none;
}
absl::StatusOr<CommBuffer> Endpoint::allocate(size_t) {
  return absl::UnimplementedError("endpoints are not there yet");
}
void Endpoint::free(const CommBuffer&) {}
bool Endpoint::progress() { return false; }
int Endpoint::event_fd() const { return -1; }
Worker& Endpoint::worker() { std::abort(); }

}  // namespace baton
