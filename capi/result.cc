// Results, errors and bytes of the C interface.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "capi/agent_handle.h"

namespace baton::capi {
namespace {

struct Result {
  int32_t number;
  const char* name;
  absl::StatusCode code;
};
// The first of several with one code is the number of that code.
constexpr Result kResults[] = {
    {BATON_OK, "BATON_OK", absl::StatusCode::kOk},
    {BATON_ERR_UNKNOWN, "BATON_ERR_UNKNOWN", absl::StatusCode::kUnknown},
    {BATON_IN_PROGRESS, "BATON_IN_PROGRESS", absl::StatusCode::kUnknown},
    {BATON_ERR_NOT_POSTED, "BATON_ERR_NOT_POSTED", absl::StatusCode::kUnknown},
    {BATON_ERR_INVALID_PARAM, "BATON_ERR_INVALID_PARAM", absl::StatusCode::kInvalidArgument},
    {BATON_ERR_BACKEND, "BATON_ERR_BACKEND", absl::StatusCode::kResourceExhausted},
    {BATON_ERR_NOT_FOUND, "BATON_ERR_NOT_FOUND", absl::StatusCode::kNotFound},
    {BATON_ERR_MISMATCH, "BATON_ERR_MISMATCH", absl::StatusCode::kDataLoss},
    {BATON_ERR_NOT_ALLOWED, "BATON_ERR_NOT_ALLOWED", absl::StatusCode::kFailedPrecondition},
    {BATON_ERR_REPOST_ACTIVE, "BATON_ERR_REPOST_ACTIVE", absl::StatusCode::kUnknown},
    {BATON_ERR_NOT_SUPPORTED, "BATON_ERR_NOT_SUPPORTED", absl::StatusCode::kUnimplemented},
    {BATON_ERR_REMOTE_DISCONNECT, "BATON_ERR_REMOTE_DISCONNECT", absl::StatusCode::kUnavailable},
    {BATON_ERR_CANCELED, "BATON_ERR_CANCELED", absl::StatusCode::kCancelled},
    {BATON_ERR_TIMEOUT, "BATON_ERR_TIMEOUT", absl::StatusCode::kDeadlineExceeded},
};

// BATON_ERR_UNKNOWN where there is none such.
template <typename Is>
const Result& find_result(Is&& is) {
  const Result* const found = std::find_if(std::begin(kResults), std::end(kResults), is);
  return found == std::end(kResults) ? kResults[1] : *found;
}

int32_t number_of(const absl::Status& status, About about) {
  switch (status.code()) {  // those that have no number of their own, or not always
    case absl::StatusCode::kOutOfRange:
      return BATON_ERR_INVALID_PARAM;
    case absl::StatusCode::kPermissionDenied:
      return BATON_ERR_NOT_ALLOWED;
    case absl::StatusCode::kInternal:
      return BATON_ERR_BACKEND;
    case absl::StatusCode::kAlreadyExists:
      return about == About::kTransfer ? BATON_ERR_REPOST_ACTIVE
             : about == About::kMaking ? BATON_ERR_BACKEND
                                       : BATON_ERR_NOT_ALLOWED;
    case absl::StatusCode::kFailedPrecondition:
      // A transfer that was not posted is told apart from what else is not allowed.
      if (status.GetPayload(kvtransfer::kNotPosted)) return BATON_ERR_NOT_POSTED;
      break;
    case absl::StatusCode::kUnavailable:
      if (about == About::kMaking) return BATON_ERR_BACKEND;
      break;
    default:
      break;
  }
  return find_result([&](const Result& each) { return each.code == status.code(); }).number;
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

absl::StatusCode code_of(int32_t result) {
  return find_result([&](const Result& each) { return each.number == result; }).code;
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
  return baton::capi::find_result([&](const auto& each) { return each.number == result; }).name;
}

}  // extern "C"
