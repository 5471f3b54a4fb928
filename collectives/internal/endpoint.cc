// The public calls of Endpoint, which a process's communicators share.
#include "collectives/endpoint.h"

#include "collectives/internal/endpoint_impl.h"

namespace baton {

using collectives::internal::EndpointImpl;

Endpoint::Endpoint(std::unique_ptr<EndpointImpl> impl) : impl_(std::move(impl)) {}
Endpoint::~Endpoint() {
  if (!impl_->usable().ok()) (void)impl_.release();  // the parent's, and its thread is not here
}

absl::StatusOr<std::shared_ptr<Endpoint>> Endpoint::open(EndpointOptions options) {
  absl::StatusOr<std::unique_ptr<EndpointImpl>> impl = EndpointImpl::open(std::move(options));
  if (!impl.ok()) return impl.status();
  return std::shared_ptr<Endpoint>(new Endpoint(*std::move(impl)));
}

const Handle& Endpoint::handle() const { return impl_->handle(); }

absl::StatusOr<CommBuffer> Endpoint::allocate(size_t bytes) {
  if (absl::Status status = impl_->usable(); !status.ok()) return status;
  std::lock_guard lock(impl_->mutex());
  return impl_->allocate(bytes);
}

void Endpoint::free(const CommBuffer& buffer) {
  if (!impl_->usable().ok()) return;
  std::lock_guard lock(impl_->mutex());
  impl_->free(buffer);
}

bool Endpoint::progress() { return impl_->usable().ok() && impl_->progress(); }
int Endpoint::event_fd() const { return impl_->event_fd(); }
Worker& Endpoint::worker() { return impl_->worker(); }

}  // namespace baton
