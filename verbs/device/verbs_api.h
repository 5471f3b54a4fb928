// The verbs calls as a table of function pointers, loaded at run time: one binary serves
// machines with and without an RDMA stack, and tests put fakes in their place.
//
// Only calls that are symbols of the library are here. Posting, polling and arming are inline
// functions of <infiniband/verbs.h> that go through the operations inside an ibv_context; a fake
// provides those there.
#pragma once

#include <infiniband/verbs.h>

#include "absl/status/statusor.h"

namespace baton::verbs {

#define BATON_VERBS_FUNCTIONS(F) \
  F(ibv_get_device_list)         \
  F(ibv_free_device_list)        \
  F(ibv_get_device_name)         \
  F(ibv_open_device)             \
  F(ibv_close_device)            \
  F(ibv_query_device)            \
  F(_ibv_query_gid_table)        \
  F(ibv_alloc_pd)                \
  F(ibv_dealloc_pd)              \
  F(ibv_reg_mr)                  \
  F(ibv_reg_mr_iova2)            \
  F(ibv_dereg_mr)                \
  F(ibv_create_comp_channel)     \
  F(ibv_destroy_comp_channel)    \
  F(ibv_get_cq_event)            \
  F(ibv_ack_cq_events)           \
  F(ibv_create_cq)               \
  F(ibv_destroy_cq)              \
  F(ibv_create_srq)              \
  F(ibv_destroy_srq)             \
  F(ibv_create_qp)               \
  F(ibv_modify_qp)               \
  F(ibv_destroy_qp)              \
  F(ibv_get_async_event)         \
  F(ibv_ack_async_event)         \
  F(ibv_fork_init)

// Null where the library is older than they are.
#define BATON_VERBS_OPTIONAL(F) F(ibv_reg_dmabuf_mr)

// NOLINTNEXTLINE(bugprone-macro-parentheses): a name that is declared takes none.
#define BATON_DECLARE(name) decltype(&::name) name = nullptr;
struct VerbsApi {
  BATON_VERBS_FUNCTIONS(BATON_DECLARE)
  BATON_VERBS_OPTIONAL(BATON_DECLARE)
};
#undef BATON_DECLARE

// The table of this machine's libibverbs.so.1, loaded once. Unavailable, with the remedy: this
// machine does not have it. Thread-safe; it lives as long as the process.
absl::StatusOr<const VerbsApi*> load_verbs();

// ibv_query_port() without a symbol of the library: 0 or an errno.
int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes);

}  // namespace baton::verbs
