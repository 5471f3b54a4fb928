// Results, errors and bytes of the C interface.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "capi/agent_handle.h"

namespace baton::capi {
namespace {

int32_t number_of(const absl::Status& status, About about) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return BATON_OK;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return BATON_ERR_INVALID_PARAM;
    case absl::StatusCode::kNotFound:
      return BATON_ERR_NOT_FOUND;
    case absl::StatusCode::kDataLoss:
      return BATON_ERR_MISMATCH;
    case absl::StatusCode::kFailedPrecondition:
      // A transfer that was not posted is told apart from what else is not allowed.
      return status.GetPayload(kvtransfer::kNotPosted) ? BATON_ERR_NOT_POSTED
                                                       : BATON_ERR_NOT_ALLOWED;
    case absl::StatusCode::kPermissionDenied:
      return BATON_ERR_NOT_ALLOWED;
    case absl::StatusCode::kAlreadyExists:
      return about == About::kTransfer ? BATON_ERR_REPOST_ACTIVE
             : about == About::kMaking ? BATON_ERR_BACKEND
                                       : BATON_ERR_NOT_ALLOWED;
    case absl::StatusCode::kUnimplemented:
      return BATON_ERR_NOT_SUPPORTED;
    case absl::StatusCode::kUnavailable:
      return about == About::kMaking ? BATON_ERR_BACKEND : BATON_ERR_REMOTE_DISCONNECT;
    case absl::StatusCode::kCancelled:
      return BATON_ERR_CANCELED;
    case absl::StatusCode::kDeadlineExceeded:
      return BATON_ERR_TIMEOUT;
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kInternal:
      return BATON_ERR_BACKEND;
    default:
      return BATON_ERR_UNKNOWN;
  }
}

}  // namespace

int32_t result_of(const absl::Status& status, baton_error* error, About about) {
  const int32_t result = number_of(status, about);
  constexpr size_t kHead = offsetof(baton_error, text);
  if (error == nullptr || error->size <= kHead) return result;
  const size_t room = std::min(error->size, sizeof *error) - kHead - 1;
  const size_t bytes = std::min(room, status.message().size());
  error->result = result;
  if (bytes > 0) std::memcpy(error->text, status.message().data(), bytes);
  error->text[bytes] = 0;
  return result;
}

int32_t invalid(const char* what, baton_error* error) {
  return result_of(absl::InvalidArgumentError(what), error);
}

absl::Status give(std::string_view text, baton_bytes* out) {
  if (out == nullptr) return absl::OkStatus();
  *out = {};
  out->data = static_cast<char*>(std::malloc(text.size() + 1));
  if (out->data == nullptr) {
    return absl::ResourceExhaustedError("no memory is left");
  }
  if (!text.empty()) std::memcpy(out->data, text.data(), text.size());
  out->data[text.size()] = 0;
  out->size = text.size();
  return absl::OkStatus();
}

absl::Status give_made(const absl::StatusOr<std::string>& text, baton_bytes* out) {
  return text.ok() ? give(*text, out) : text.status();
}

absl::Status give_all(std::initializer_list<Gift> gifts) {
  for (const Gift& gift : gifts) {
    absl::Status status = give(gift.text, gift.out);
    if (status.ok()) continue;
    for (const Gift* given = gifts.begin(); given != &gift; ++given) baton_bytes_free(given->out);
    return status;
  }
  return absl::OkStatus();
}

}  // namespace baton::capi

extern "C" {

void baton_bytes_free(baton_bytes* bytes) {
  if (bytes == nullptr) return;
  std::free(bytes->data);
  *bytes = {};
}

const char* baton_version(void) { return BATON_VERSION; }

const char* baton_result_name(int32_t result) {
  switch (result) {
    case BATON_OK:
      return "BATON_OK";
    case BATON_IN_PROGRESS:
      return "BATON_IN_PROGRESS";
    case BATON_ERR_NOT_POSTED:
      return "BATON_ERR_NOT_POSTED";
    case BATON_ERR_INVALID_PARAM:
      return "BATON_ERR_INVALID_PARAM";
    case BATON_ERR_BACKEND:
      return "BATON_ERR_BACKEND";
    case BATON_ERR_NOT_FOUND:
      return "BATON_ERR_NOT_FOUND";
    case BATON_ERR_MISMATCH:
      return "BATON_ERR_MISMATCH";
    case BATON_ERR_NOT_ALLOWED:
      return "BATON_ERR_NOT_ALLOWED";
    case BATON_ERR_REPOST_ACTIVE:
      return "BATON_ERR_REPOST_ACTIVE";
    case BATON_ERR_NOT_SUPPORTED:
      return "BATON_ERR_NOT_SUPPORTED";
    case BATON_ERR_REMOTE_DISCONNECT:
      return "BATON_ERR_REMOTE_DISCONNECT";
    case BATON_ERR_CANCELED:
      return "BATON_ERR_CANCELED";
    case BATON_ERR_TIMEOUT:
      return "BATON_ERR_TIMEOUT";
    default:
      return "BATON_ERR_UNKNOWN";
  }
}

}  // extern "C"
