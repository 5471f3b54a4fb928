# The tests whose programs start threads: the thread sanitizer runs these. A new test that starts one
# belongs here, unless others do the same with them (sums in an order, on devices; what calls cost).
# `LD_PRELOAD` of a library that notes who calls pthread_create() found them. Not the fault guard's: that
# sanitizer calls handlers of signals itself, with others blocked than the kernel would.
# Nor one that starts `baton`, which would be built for it alone: what its commands start has tests here.
set(BATON_TESTS_WITH_THREADS
  admission_test agent_bad_input_test agent_bounds_test agent_deaths_test agent_files_test
  agent_test allocation_test any_thread_test baton_disaggregation_test capi_connector_test capi_hostile_test
  capi_test capi_threads_test chat_template_test checkpoint_test communicator_calls_test communicator_failure_test
  communicator_mismatch_test communicator_results_test communicator_system_calls_test
  conformance_slow_test conformance_test data_parallel_test degrees_test disaggregation_test
  engine_kernels_test engine_test engine_train_test flight_recorder_test lost_worker_test
  hand_off_test http_test kv_connector_test kv_hostile_test kv_names_test kv_processes_test kv_pull_test kv_silence_test
  kv_store_test kv_tiers_test lm_server_test load_servers_test metadata_etcd_test metadata_store_test nccl_net_process_test nccl_net_test nccl_rma_test
  parting_test process_test recovery_test registration_test rendezvous_test router_test routing_test
  shard_test shm_peer_test shm_rail_test sleep_test stranger_test tcp_faults_test tcp_names_test
  tcp_session_test tiers_test transport_test ucx_parts_test ucx_peers_test verbs_faults_test verbs_parts_test worker_tls_test)
