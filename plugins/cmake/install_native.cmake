# moec_install_native(target): the library goes to moec/_native of the installed package and, outside of a wheel
# build, of the source tree as well, so that a checkout runs without an installation.
function(moec_install_native target)
  install(TARGETS ${target} LIBRARY DESTINATION moec/_native RUNTIME DESTINATION moec/_native)
  if(NOT SKBUILD)
    set(folder ${CMAKE_SOURCE_DIR}/../moec/_native)
    add_custom_command(TARGET ${target} POST_BUILD
      COMMAND ${CMAKE_COMMAND} -E make_directory ${folder}
      COMMAND ${CMAKE_COMMAND} -E copy_if_different $<TARGET_FILE:${target}> ${folder}
      VERBATIM)
  endif()
endfunction()
